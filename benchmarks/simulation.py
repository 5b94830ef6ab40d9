"""The simulator against the real mesh: five small padded jobs run both ways, predicted beside measured.

    python benchmarks/simulation.py [--steps 5] [--pad-ms 40] [--json]

What the simulator is told was measured beforehand, on three other jobs, by the mesh's own telemetry: compute
per block from the claims (`forward_ms`, `backward_ms`), and constants: what a microbatch takes beside that
(`compute_ms`), a hop (`hop_ms`), a step around its computing (`begin_ms`, `prepare_ms`). They are printed as
a scenario's `overheads`; nothing is fitted to the five. Compute is padded (`workers/models/padded.py`).
Nothing is asserted: an error above 5 % is marked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bus.connection import Bus
from bus.subjects import STEP_CLAIM
from dmsc.client.async_client import AsyncClient
from dmsc.launch.layout import MeshOptions
from dmsc.launch.mesh import running_mesh
from dmsc.process.composition import node_name
from dmsc.simulation.results.parallel import simulate
from dmsc.simulation.scenarios.scenario import Scenario
from dmsc.state.settings import find_bus
from schemas.envelope import EntityKind, Envelope
from schemas.job import JobSpec, JobState
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
    spread: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def spec(
    name: str, stages: int, replicas: int | Sequence[int], microbatches: int, steps: int, pad_ms: float
) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": name,
            "model": {
                "factory": "workers.models.padded:padded_gpt",
                "args": {"pad_ms": pad_ms, "layers": BLOCKS, "width": 64, "heads": 4, "context": 64},
            },
            "data": {"source": "stdlib:", "sample_tokens": 64},
            "training": {
                "steps": WARMUP + steps,
                "microbatches": microbatches,
                "microbatch_samples": 2,
                "optimizer": {"lr": 1e-3},
                "seed": 5,
                "validation_microbatches": 0,
                "checkpoint_every": 0,
            },
            "parallel": {"stages": stages, "replicas": replicas},
        }
    )


async def measure(client: AsyncClient, bus: Bus, wanted: JobSpec) -> Measured:
    """Runs a job; its steps after the warm-up."""
    claims: list[MicrobatchClaim] = []

    async def claimed(claim: MicrobatchClaim, _: Envelope) -> None:
        if claim.step >= WARMUP:
            claims.append(claim)

    subscription = await bus.subscribe(STEP_CLAIM, claimed)
    try:
        job = (await client.submit(wanted)).job
        steps = [
            event.result.step_s
            async for event in client.events(job)
            if event.kind == "step" and event.result is not None and event.result.step >= WARMUP
        ]
    finally:
        await subscription.stop()
    record = await client.job(job)
    if record.state is not JobState.DONE or record.graph is None:
        sys.exit(f"{job} ended {record.state.value}: {record.reason}")
    stages = wanted.parallel.stages
    units = [record.graph.stage(stage)[0] for stage in range(stages)]
    # layers: embed, the blocks, head
    blocks = [
        len(set(range(unit.first_layer, unit.last_layer)) & set(range(1, BLOCKS + 1))) for unit in units
    ]
    mine = [claim for claim in claims if claim.job == job]
    return Measured(
        step_s=statistics.median(steps),
        steps=tuple(steps),
        forward_ms=tuple(_mean(mine, stage, "forward_ms") for stage in range(stages)),
        backward_ms=tuple(_mean(mine, stage, "backward_ms") for stage in range(stages)),
        blocks=tuple(blocks),
        parameters=sum(unit.requirements.memory_bytes for unit in units) // 28,
    )


def _mean(claims: Sequence[MicrobatchClaim], stage: int, name: str) -> float:
    return statistics.fmean(getattr(claim, name) for claim in claims if claim.stage == stage)


async def calibrate(client: AsyncClient, bus: Bus, steps: int, pad_ms: float) -> Calibration:
    """Three jobs that are none of the scenarios: one microbatch, several in a row, one through two stages."""
    one = await measure(client, bus, spec("calibrate-one", 1, 1, 1, steps, pad_ms))
    row = await measure(client, bus, spec("calibrate-row", 1, 1, 5, steps, pad_ms))
    two = await measure(client, bus, spec("calibrate-two", 2, 1, 1, steps, pad_ms))

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


def predict(name: str, calibration: Calibration, wanted: JobSpec, measured: Measured) -> float:
    """Microbatches/s by the simulator, for the same cut."""
    replicas = wanted.parallel.replicas_per_stage()
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
                    "microbatches": wanted.training.microbatches,
                    "stages": stages,
                }
            ],
            "overheads": calibration.overheads,
        }
    )
    found = simulate(scenario, 0, Path()).jobs[0].step_p50_s
    assert found is not None
    return wanted.training.microbatches / found


async def compare(steps: int, pad_ms: float) -> tuple[Calibration, list[Comparison]]:
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-", ignore_cleanup_errors=True) as name:
        options = MeshOptions(
            state=Path(name) / "state", nats_port=0, http_port=0, slots=6, node=node_name(), clusters=("a",)
        )
        async with running_mesh(options, say) as mesh:
            address = find_bus(state=mesh.folder.path)
            async with (
                AsyncClient(state=mesh.folder.path) as client,
                Bus.connect(address.servers, name="bench", kind=EntityKind.TAP, token=address.token) as bus,
            ):
                calibration = await calibrate(client, bus, steps, pad_ms)
                say(f"calibrated: {json.dumps(asdict(calibration))}")
                found = []
                for number, (title, stages, replicas, microbatches) in enumerate(SCENARIOS):
                    wanted = spec(f"bench-{number}", stages, replicas, microbatches, steps, pad_ms)
                    measured = await measure(client, bus, wanted)
                    predicted = predict(f"bench-{number}", calibration, wanted, measured)
                    found.append(
                        Comparison(
                            name=title,
                            measured=microbatches / measured.step_s,
                            predicted=predicted,
                            spread=(microbatches / max(measured.steps), microbatches / min(measured.steps)),
                        )
                    )
                    say(f"{title}: measured {found[-1].measured:.2f}, predicted {predicted:.2f} a second")
                    say(f"  ms per block: {_per_block(measured)}")
                return calibration, found


def _per_block(measured: Measured) -> str:
    """What the scenario's own claims say, for comparison with the calibration; not used."""
    return ", ".join(
        f"stage {stage} {measured.forward_ms[stage] / max(1, blocks):.1f} + "
        f"{measured.backward_ms[stage] / max(1, blocks):.1f}"
        for stage, blocks in enumerate(measured.blocks)
    )


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps per job")
    parser.add_argument("--pad-ms", type=float, default=40.0, help="wait per block: emulates devices")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    calibration, found = asyncio.run(compare(arguments.steps, arguments.pad_ms))
    if arguments.json:
        rows = [{**asdict(one), "error": one.error} for one in found]
        print(json.dumps({"calibration": asdict(calibration), "scenarios": rows}, indent=2))
        return
    print(f"overheads: {json.dumps(calibration.overheads)}")
    print(
        f"{'':20} {'measured':>9} {'predicted':>10} {'error':>7}   microbatches/s (slowest to fastest step)"
    )
    for one in found:
        kept = "" if abs(one.error) <= BAR else "  ✗ above 5 %"
        print(
            f"{one.name:20} {one.measured:9.2f} {one.predicted:10.2f} {one.error:+7.1%}"
            f"   {one.spread[0]:.2f} to {one.spread[1]:.2f}{kept}"
        )


if __name__ == "__main__":
    main()
