"""Simulator and planner against the real mesh: five small padded jobs, predicted beside measured.

    python -m benchmarks.simulation [--steps 5] [--pad-ms 40] [--json]

What the simulator is told was measured beforehand, on three other jobs, by the mesh's own telemetry: compute
per block from the claims (`forward_ms`, `backward_ms`), and constants: what a microbatch takes beside that
(`compute_ms`), a hop (`hop_ms`), a step around its computing (`begin_ms`, `prepare_ms`). They are printed as
a scenario's `overheads`; nothing is fitted to the five. Compute is padded (`workers/models/padded.py`).
Beside it stands the forecast of a step by the planner (`graph.forecast`), which knows the analysis alone.
Nothing is asserted: an error above 5 % is marked.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.jobs import job, trained
from benchmarks.harness.meshes import BenchMesh, open_mesh
from bus.subjects import STEP_CLAIM
from dmsc.simulation.results.parallel import simulate
from dmsc.simulation.scenarios.scenario import Scenario
from schemas.envelope import EntityKind, Envelope
from schemas.job import JobSpec
from schemas.step import MicrobatchClaim

BLOCKS = 4
WARMUP = 2
BAR = 0.05
BYTES_PER_PARAMETER = 8  # what replicas all-reduce: int64 sums
SCENARIOS: tuple[tuple[str, int, int | tuple[int, ...], int], ...] = (
    # name, stages, replicas, microbatches
    ("1 stage × 2", 1, 2, 8),
    ("2 stages × 1", 2, 1, 8),
    ("2 stages × 2", 2, 2, 12),
    ("4 stages × 1", 4, 1, 8),
    ("2 stages, 1 and 3", 2, (1, 3), 8),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One job on the mesh. Milliseconds are means over its claims, by stage; blocks as it was cut."""

    step_s: float
    steps: tuple[float, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    blocks: tuple[int, ...]
    parameters: int
    forecast_s: float
    """Of a step, by the planner, before the first one."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants for all scenarios: compute of one block, and the mesh's own."""

    block_forward_ms: float
    block_backward_ms: float
    overheads: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Throughputs in microbatches/s."""

    name: str
    measured: float
    predicted: float
    planned: float
    """By the planner's forecast."""
    spread: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def plan_error(self) -> float:
        return self.planned / self.measured - 1


def spec(
    name: str, stages: int, replicas: int | Sequence[int], microbatches: int, steps: int, pad_ms: float
) -> JobSpec:
    return JobSpec.model_validate(
        job(
            name,
            steps=WARMUP + steps,
            microbatches=microbatches,
            samples=2,
            layers=BLOCKS,
            width=64,
            context=64,
            pad_ms=pad_ms,
            training={"optimizer": {"lr": 1e-3}, "seed": 5},
            parallel={"stages": stages, "replicas": replicas},
        )
    )


async def measure(mesh: BenchMesh, planned: JobSpec) -> Measured:
    """Runs a job; its steps after the warm-up."""
    claims: list[MicrobatchClaim] = []

    async def claimed(claim: MicrobatchClaim, _: Envelope) -> None:
        if claim.step >= WARMUP:
            claims.append(claim)

    subscription = await mesh.bus.subscribe(STEP_CLAIM, claimed)
    try:
        record, seconds = await trained(mesh.client, planned)
    finally:
        await subscription.stop()
    steps = [seconds[step] for step in seconds if step >= WARMUP]
    assert record.graph is not None
    stages = planned.parallel.stages
    units = [record.graph.stage(stage)[0] for stage in range(stages)]
    # layers: embed, the blocks, head
    blocks = [
        len(set(range(unit.first_layer, unit.last_layer)) & set(range(1, BLOCKS + 1))) for unit in units
    ]
    own = [claim for claim in claims if claim.job == record.job]
    return Measured(
        step_s=statistics.median(steps),
        steps=tuple(steps),
        forward_ms=tuple(_mean(own, stage, "forward_ms") for stage in range(stages)),
        backward_ms=tuple(_mean(own, stage, "backward_ms") for stage in range(stages)),
        blocks=tuple(blocks),
        parameters=sum(unit.requirements.memory_bytes for unit in units) // 28,
        forecast_s=(record.graph.forecast.step_ms if record.graph.forecast is not None else float("nan"))
        / 1e3,
    )


def _mean(claims: Sequence[MicrobatchClaim], stage: int, name: str) -> float:
    return statistics.fmean(getattr(claim, name) for claim in claims if claim.stage == stage)


async def calibrate(mesh: BenchMesh, steps: int, pad_ms: float) -> Calibration:
    """Three jobs that are none of the scenarios: one microbatch, several in a row, one through two stages."""
    one = await measure(mesh, spec("calibrate-one", 1, 1, 1, steps, pad_ms))
    row = await measure(mesh, spec("calibrate-row", 1, 1, 5, steps, pad_ms))
    two = await measure(mesh, spec("calibrate-two", 2, 1, 1, steps, pad_ms))

    def compute_ms(measured: Measured) -> float:
        return sum(measured.forward_ms) + sum(measured.backward_ms)

    beside_ms = 1e3 * (row.step_s - one.step_s) / 4 - compute_ms(row)
    around_ms = 1e3 * one.step_s - compute_ms(one) - beside_ms
    hops_ms = 1e3 * two.step_s - compute_ms(two) - beside_ms - around_ms
    hop_ms = max(0.1, hops_ms / 2)
    return Calibration(
        block_forward_ms=row.forward_ms[0] / BLOCKS,
        block_backward_ms=row.backward_ms[0] / BLOCKS,
        overheads={
            # a stage computes twice per microbatch, forward and backward
            "compute_ms": round(max(0.0, beside_ms / 2), 3),
            "hop_ms": round(hop_ms, 3),
            "data_ms": 0.5,
            "begin_ms": round(max(0.0, (around_ms - hop_ms) / 2), 3),
            "prepare_ms": round(max(0.0, (around_ms - hop_ms) / 2), 3),
            "decide_ms": 0.0,
            "commit_ms": 2.0,
        },
    )


def predict(name: str, calibration: Calibration, planned: JobSpec, measured: Measured) -> float:
    """Microbatches/s by the simulator, for the same cut."""
    replicas = planned.parallel.replicas_per_stage()
    stages = [
        {
            "replicas": count,
            "forward_ms": blocks * calibration.block_forward_ms,
            "backward_ms": blocks * calibration.block_backward_ms,
            "output_bytes": 2 * 64 * 64 * 4,
            "parameter_bytes": BYTES_PER_PARAMETER * measured.parameters / len(replicas),
        }
        for count, blocks in zip(replicas, measured.blocks, strict=True)
    ]
    scenario = Scenario.model_validate(
        {
            "name": name,
            "clusters": [{"name": "a"}],
            "links": [{"between": ["a", "a"], "latency_ms": 0}],
            "jobs": [
                {
                    "name": "job",
                    "steps": 20,
                    "warmup_steps": WARMUP,
                    "microbatches": planned.training.microbatches,
                    "stages": stages,
                }
            ],
            "overheads": calibration.overheads,
        }
    )
    found = simulate(scenario, 0, Path()).jobs[0].step_p50_s
    assert found is not None
    return planned.training.microbatches / found


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    steps, pad_ms = options.steps, options.pad_ms
    async with open_mesh("a", slots=6, kind=EntityKind.TAP, tell=say) as mesh:
        calibration = await calibrate(mesh, steps, pad_ms)
        say(f"calibrated: {json.dumps(asdict(calibration))}")
        found = []
        for number, (title, stages, replicas, microbatches) in enumerate(SCENARIOS):
            planned = spec(f"bench-{number}", stages, replicas, microbatches, steps, pad_ms)
            measured = await measure(mesh, planned)
            predicted = predict(f"bench-{number}", calibration, planned, measured)
            found.append(
                Comparison(
                    name=title,
                    measured=microbatches / measured.step_s,
                    predicted=predicted,
                    planned=microbatches / measured.forecast_s,
                    spread=(microbatches / max(measured.steps), microbatches / min(measured.steps)),
                )
            )
            said = f"simulated {predicted:.2f}, planned {found[-1].planned:.2f}"
            say(f"{title}: measured {found[-1].measured:.2f}, {said} a second")
            say(f"  ms per block: {_per_block(measured)}")
        rows = [{**asdict(row), "error": row.error, "plan_error": row.plan_error} for row in found]
        return {"calibration": calibration, "scenarios": rows}


def _per_block(measured: Measured) -> str:
    """What the scenario's own claims say, for comparison with the calibration; not used."""
    return ", ".join(
        f"stage {stage} {measured.forward_ms[stage] / max(1, blocks):.1f} + "
        f"{measured.backward_ms[stage] / max(1, blocks):.1f}"
        for stage, blocks in enumerate(measured.blocks)
    )


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"overheads: {json.dumps(found['calibration'].overheads)}"
    head = f"{'':20} {'measured':>9} {'simulated':>10} {'error':>7} {'planned':>9} {'error':>7}"
    yield f"{head}   microbatches/s (slowest to fastest step)"
    for row in found["scenarios"]:
        low, high = row["spread"]
        kept = "" if max(abs(row["error"]), abs(row["plan_error"])) <= BAR else "  ✗ above 5 %"
        yield (
            f"{row['name']:20} {row['measured']:9.2f} {row['predicted']:10.2f} {row['error']:+7.1%}"
            f" {row['planned']:9.2f} {row['plan_error']:+7.1%}   {low:.2f} to {high:.2f}{kept}"
        )


if __name__ == "__main__":
    bench(
        command(
            __doc__,
            steps=(5, "measured steps per job"),
            pad_ms=(40.0, "wait per block: emulates devices"),
        ),
        compare,
        lines,
    )
