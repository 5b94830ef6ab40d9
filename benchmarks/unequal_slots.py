"""A plan for five unequal slots beside the plan of equal ones, on real padded jobs, in turn.

    python -m benchmarks.unequal_slots [--rounds 5] [--steps 2] [--pad-ms 20] [--json]

The slots have speeds 1, 1, 2, 2 and 4, and the fastest half the memory of the others, too little for the
whole model. `planned`: stages and replicas are the planner's (`parallel: auto`), on emulated slots.
`former`: what DMSC did before ADR-0070, which knew neither speed nor memory: equal groups, three and two
instances, in the order of the slots, replica by replica, cut as for slots that are alike. Its slots
register speed 1, and scripts of their node make them what they are (`schemas.slot_conditions`); so today's
plan for slots that are alike is that plan, which is asserted. Both have today's routing, which
learns the former's speeds in its first step.

A round trains one job of each. Prints the medians of steps, the forecast beside them, and whether the weights
are the same bits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.emulation import EmulatedSlots
from benchmarks.harness.jobs import digest, job, trained
from benchmarks.harness.meshes import BenchMesh, new_folder, open_mesh
from dmsc.process.composition import node_name
from schemas.job import JobSpec

SPEEDS = (1.0, 1.0, 2.0, 2.0, 4.0)
FAST_GIB = 0.005
"""Of the fastest slot: half of what the others have."""
FORMER = {"stages": 2, "replicas": (3, 2)}
MICROBATCHES, BLOCKS = 16, 12
SKIPPED = 2
"""First steps that are not measured: routing learns the former plan's speeds in them."""
BARS = {"measured ÷ forecast": (0.0, 1 / 0.95), "former ÷ planned": (1.3, float("inf"))}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job; milliseconds."""

    forecast_ms: float
    steps_ms: tuple[float, ...]
    sha256: str
    plan: str

    @property
    def median_ms(self) -> float:
        return statistics.median(self.steps_ms)


def spec(name: str, options: argparse.Namespace, parallel: dict[str, Any]) -> JobSpec:
    """Small layers: what they compute themselves hardly counts beside their waits."""
    return JobSpec.model_validate(
        job(
            name,
            steps=SKIPPED + options.steps,
            microbatches=MICROBATCHES,
            layers=BLOCKS,
            width=32,
            heads=2,
            context=16,
            pad_ms=options.pad_ms,
            training={"optimizer": {"lr": 1e-3}, "seed": 5},
            parallel={"stages": 1, "replicas": 1, **parallel},
        )
    )


async def train(mesh: BenchMesh, planned: JobSpec, *, former: bool = False) -> Run:
    record, seconds = await trained(mesh.client, planned)
    graph = record.graph
    assert graph is not None
    assert graph.forecast is not None
    if former:
        order = sorted((int(sid[-1]), sid) for sid in (unit.sid for unit in graph.units if unit.stage >= 0))
        slots = {place.sid: place.slot for place in graph.placements}
        assert [slots[sid] for _, sid in order] == list(range(len(SPEEDS))), "not the former placement"
    return Run(
        forecast_ms=graph.forecast.step_ms,
        steps_ms=tuple(1e3 * seconds[step] for step in sorted(seconds) if step >= SKIPPED),
        sha256=digest(record),
        plan=graph.reason,
    )


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    emulated = tuple(f"{speed:g}:{FAST_GIB if speed == max(SPEEDS) else 2 * FAST_GIB:g}" for speed in SPEEDS)
    runs: dict[str, list[Run]] = {"planned": [], "former": []}
    auto = {"stages": "auto", "replicas": "auto", "slots": len(SPEEDS)}
    async with AsyncExitStack() as stack:
        planned = await stack.enter_async_context(open_mesh("a", emulate_slots=emulated))
        scripts = stack.enter_context(new_folder())
        alike = ("1",) * len(SPEEDS)
        former = await stack.enter_async_context(open_mesh("a", emulate_slots=alike, emulation=scripts))
        EmulatedSlots(scripts, "a", node_name()).set_speeds(dict(enumerate(SPEEDS)))
        for number in range(options.rounds):
            for kind in ("planned", "former") if number % 2 == 0 else ("former", "planned"):
                if kind == "planned":
                    run = await train(planned, spec(f"planned-{number}", options, auto))
                else:
                    run = await train(former, spec(f"former-{number}", options, FORMER), former=True)
                runs[kind].append(run)
                said = f"forecast {run.forecast_ms:.0f} ms, " if kind == "planned" else ""
                say(f"round {number + 1}: {kind:8} {said}measured {run.median_ms:.0f} ms; {run.plan}")
    mine, theirs = (statistics.median(run.median_ms for run in runs[kind]) for kind in ("planned", "former"))
    return {
        "figures": {
            "measured ÷ forecast": mine / statistics.median(run.forecast_ms for run in runs["planned"]),
            "former ÷ planned": theirs / mine,
        },
        "by_round": [
            before.median_ms / now.median_ms
            for now, before in zip(runs["planned"], runs["former"], strict=True)
        ],
        "same_bits": len({run.sha256 for kind in runs.values() for run in kind}) == 1,
        "runs": {kind: list(map(asdict, found)) for kind, found in runs.items()},
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    for name, value in found["figures"].items():
        low, high = BARS[name]
        yield f"{name:22} {value:.3f}{'' if low <= value <= high else '  ✗ misses its bar'}"
    yield f"{'by round':22} {', '.join(f'{ratio:.2f}' for ratio in found['by_round'])}"
    yield f"{'weights':22} {'the same bits' if found['same_bits'] else '✗ differ'}"
    yield f"planned: {found['runs']['planned'][0]['plan']}"


if __name__ == "__main__":
    bench(
        command(
            __doc__,
            rounds=(5, "jobs of each kind, in turn"),
            steps=(2, "measured steps of a job"),
            pad_ms=(20.0, "wait of a block at speed 1, forward; twice that backward"),
        ),
        compare,
        lines,
    )
