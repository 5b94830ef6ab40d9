"""The planner's forecast of a step beside steps of real padded jobs, on equal and on unequal slots.

    python -m benchmarks.forecast [--steps 4] [--pad-ms 40] [--json]

Blocks wait (`workers/models/padded.py`), so that slots behave like devices; unequal ones are emulated
(`dmsc up --emulate-slot`). The forecast is that of the job's record before its first step (`graph.forecast`),
the figure beside it the median of its steps after the first one. Nothing is asserted: what is off by more
than 5 % is marked.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.jobs import job, trained
from benchmarks.harness.meshes import BenchMesh, open_mesh
from schemas.job import JobSpec

BAR = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job: its shape, and how many blocks it has."""

    name: str
    parallel: dict[str, Any]
    blocks: int = 4


EQUAL = ("1", "1", "1", "1")
UNEQUAL = ("1", "1", "3", "3")
CASES: tuple[tuple[tuple[str, ...], tuple[Case, ...]], ...] = (
    (
        EQUAL,
        (
            Case(name="1 stage × 4", parallel={"stages": 1, "replicas": 4}),
            Case(name="2 stages × 2", parallel={"stages": 2, "replicas": 2}),
            Case(name="4 stages × 1", parallel={"stages": 4, "replicas": 1}),
            Case(name="3 unequal stages, 5 blocks", parallel={"stages": 3, "replicas": 1}, blocks=5),
        ),
    ),
    (
        UNEQUAL,
        (
            Case(name="1 stage, speeds 1 1 3 3", parallel={"stages": 1, "replicas": 4}),
            Case(name="2 stages, speeds 1 1 3 3", parallel={"stages": 2, "replicas": 2}),
            Case(name="1 before 3, speeds 1 1 3 3", parallel={"stages": 2, "replicas": (1, 3)}),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Milliseconds of a step."""

    name: str
    forecast_ms: float
    measured_ms: float
    first_ms: float
    steps_ms: tuple[float, ...]
    planned_by: str

    @property
    def ratio(self) -> float:
        """Measured ÷ forecast."""
        return self.measured_ms / self.forecast_ms


def spec(case: Case, number: int, options: argparse.Namespace) -> JobSpec:
    return JobSpec.model_validate(
        job(
            f"forecast-{number}",
            steps=1 + options.steps,
            layers=case.blocks,
            width=32,
            heads=2,
            context=32,
            pad_ms=options.pad_ms,
            training={"optimizer": {"lr": 1e-3}, "seed": 5},
            parallel=case.parallel,
        )
    )


async def measure(mesh: BenchMesh, name: str, planned: JobSpec) -> Row:
    """Runs a job."""
    record, seconds = await trained(mesh.client, planned)
    assert record.graph is not None
    assert record.graph.forecast is not None
    steps_ms = tuple(1e3 * seconds[step] for step in sorted(seconds))
    return Row(
        name=name,
        forecast_ms=record.graph.forecast.step_ms,
        measured_ms=statistics.median(steps_ms[1:]),
        first_ms=steps_ms[0],
        steps_ms=steps_ms,
        planned_by=record.graph.forecast.planned_by,
    )


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    for slots, cases in CASES:
        async with open_mesh("a", emulate_slots=slots) as mesh:
            for case in cases:
                rows.append(await measure(mesh, case.name, spec(case, len(rows), options)))
                say(line(rows[-1]))
    return {"rows": [{**asdict(row), "ratio": row.ratio} for row in rows], "lines": list(map(line, rows))}


def line(row: Row) -> str:
    mark = "" if abs(row.ratio - 1) <= BAR else "  ✗ above 5 %"
    return (
        f"{row.name:28} forecast {row.forecast_ms:6.0f} ms, measured {row.measured_ms:6.0f} ms "
        f"({row.ratio:.3f}), first step {row.first_ms:6.0f} ms{mark}"
    )


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield from found["lines"]


if __name__ == "__main__":
    bench(
        command(
            __doc__,
            steps=(4, "measured steps of a job"),
            pad_ms=(40.0, "wait of a block, forward; twice that backward"),
        ),
        compare,
        lines,
    )
