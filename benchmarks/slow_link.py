"""What routing around a slow link is worth: steps per second beside a static split, and healthy links.

    python benchmarks/slow_link.py [--latency-ms 300] [--megabytes-per-s N] [--loss P] [--rounds 2]

Two stages of two replicas, padded (`workers/models/padded.py`); of the four links between them one, from the
first replica of stage 0 to the second of stage 1, is shaped at the data plane
(`workers/links/link_shaping.py`: an emulation, whose file sandboxed instances would not see). In one mesh,
in turn, every other round in reverse:

- `routed around`: the default algorithm over the slow link, from its first step on;
- `static`: `round-robin` over the same link: all replicas get the same number;
- `healthy`: the default algorithm without shaping.

Medians of the steps after the first third, in which the link is found out; ranges over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.figures import spread
from benchmarks.harness.jobs import digest, job, trained
from benchmarks.harness.meshes import BenchMesh, new_folder, open_mesh
from benchmarks.harness.processes import turns
from bus.subjects import STEP_CLAIM
from schemas.job import JobSpec
from schemas.routing import DEFAULT_ALGORITHM
from schemas.step import MicrobatchClaim
from workers.links.link_shaping import ENVIRONMENT

KINDS = {
    "routed around": (DEFAULT_ALGORITHM, True),
    "static": ("round-robin", True),
    "healthy": (DEFAULT_ALGORITHM, False),
}


@dataclass(frozen=True)
class Found:
    """One job: seconds of a step, and the slow link's part of the microbatches."""

    step_s: float
    share: float
    sha256: str


def spec(algorithm: str, options: argparse.Namespace, data: Path) -> JobSpec:
    return JobSpec.model_validate(
        job(
            "bench-slow-link",
            steps=options.steps,
            microbatches=16,
            samples=2,
            layers=2,
            width=64,
            heads=2,
            context=64,
            pad_ms=options.pad_ms,
            source=data,
            parallel={"replicas": 2, "segmentation": "uniform"},
            routing={"algorithm": algorithm},
        )
    )


async def run(mesh: BenchMesh, spec: JobSpec) -> Found:
    """Runs a job to its end."""
    record, seconds = await trained(mesh.client, spec)
    first = len(seconds) // 3
    over = total = 0
    async for item in mesh.bus.history(STEP_CLAIM, job=record.job):
        claim = item.message
        assert isinstance(claim, MicrobatchClaim)
        if claim.step >= first and claim.stage == 1:
            total += 1
            over += claim.owner.sid.endswith("-s1-r1") and claim.upstream.endswith("-s0-r0")
    late = [seconds[step] for step in seconds if step >= first]
    return Found(statistics.median(late), over / total, digest(record))


async def measure(options: argparse.Namespace) -> dict[str, list[Found]]:
    """All kinds in turn, in one mesh."""
    found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    with new_folder() as folder:
        data, shaping = folder / "data.bin", folder / "shaping.json"
        data.write_bytes(bytes(range(256)) * 4096)
        os.environ[ENVIRONMENT] = str(shaping)
        link = {"from": "*-s0-r0", "to": "*-s1-r1", "latency_ms": options.latency_ms}
        if options.loss:
            link["loss"] = options.loss
        if options.megabytes_per_s:
            link["bytes_per_s"] = options.megabytes_per_s * 1e6
        async with open_mesh("a", slots=5, folder=folder, trust_researchers=True) as mesh:
            for number, kind in turns(list(KINDS), options.rounds):
                algorithm, slow = KINDS[kind]
                if slow:
                    shaping.write_text(json.dumps({"links": [link]}))
                else:
                    shaping.unlink(missing_ok=True)
                result = await run(mesh, spec(algorithm, options, data))
                found[kind].append(result)
                say(
                    f"round {number + 1}: {kind:14} {result.step_s * 1e3:6.0f} ms a step, "
                    f"{result.share:.1%} of the microbatches over the link"
                )
    return found


def lines(found: dict[str, list[Found]]) -> Iterator[str]:
    def beside(other: str) -> str:
        pairs = zip(found["routed around"], found[other], strict=True)
        return spread([theirs.step_s / ours.step_s for ours, theirs in pairs], unit="×")

    for kind, runs in found.items():
        step_ms = statistics.median(result.step_s * 1e3 for result in runs)
        share = statistics.median(result.share for result in runs)
        yield f"{kind:14} {step_ms:7.0f} ms a step   {share:6.1%} of the microbatches over the link"
    yield f"routed around: {beside('static')} the steps per second of static, {beside('healthy')} of healthy"
    hashes = {result.sha256 for runs in found.values() for result in runs}
    yield "weights: " + ("equal in all runs" if len(hashes) == 1 else f"DIFFER: {sorted(hashes)}")


if __name__ == "__main__":
    bench(
        command(
            __doc__,
            latency_ms=300.0,
            megabytes_per_s=(0.0, "0: as fast as it is"),
            loss=(0.0, "part of the transfers that break the link"),
            pad_ms=6.0,
            steps=30,
            rounds=2,
        ),
        measure,
        lines,
    )
