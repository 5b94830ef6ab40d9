"""What routing around a slow link is worth: steps per second beside a static split, and healthy links.

    python benchmarks/slow_link.py [--latency-ms 300] [--megabytes-per-s N] [--loss P] [--rounds 2]

Two stages of two replicas, padded (`workers/models/padded.py`); of the four links between them one, from the
first replica of stage 0 to the second of stage 1, is shaped at the data plane
(`workers/links/link_shaping.py`: an emulation). In one mesh, in turn, every other round in reverse:

- `routed around`: the default algorithm over the slow link, from its first step on;
- `static`: `round-robin` over the same link: all replicas get the same number;
- `healthy`: the default algorithm without shaping.

Medians of the steps after the first third, in which the link is found out; ranges over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bus.connection import Bus
from bus.subjects import STEP_CLAIM
from dmsc.client.async_client import AsyncClient
from dmsc.launch.layout import MeshOptions
from dmsc.launch.mesh import running_mesh
from dmsc.process.composition import node_name
from dmsc.state.settings import find_bus
from schemas.envelope import EntityKind
from schemas.job import JobSpec, JobState
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


def spec(algorithm: str, arguments: argparse.Namespace, data: Path) -> JobSpec:
    sizes = {"pad_ms": arguments.pad_ms, "layers": 2, "width": 64, "heads": 2, "context": 64}
    return JobSpec.model_validate(
        {
            "name": "bench-slow-link",
            "model": {"factory": "workers.models.padded:padded_gpt", "args": sizes},
            "data": {"source": data.as_uri(), "sample_tokens": 64},
            "training": {
                "steps": arguments.steps,
                "microbatches": 16,
                "microbatch_samples": 2,
                "validation_microbatches": 0,
                "checkpoint_every": 0,
            },
            "parallel": {"stages": 2, "replicas": 2, "segmentation": "uniform"},
            "routing": {"algorithm": algorithm},
        }
    )


async def run(client: AsyncClient, bus: Bus, wanted: JobSpec) -> Found:
    """Runs a job to its end."""
    job = (await client.submit(wanted)).job
    seconds: dict[int, float] = {}
    async for event in client.events(job):
        if event.result is not None:
            seconds[event.result.step] = event.result.step_s
    record = await client.job(job)
    if record.state is not JobState.DONE or record.weights is None:
        sys.exit(f"{job} ended {record.state}: {record.reason}")
    first = len(seconds) // 3
    over = total = 0
    async for item in bus.history(STEP_CLAIM, job=job):
        claim = item.message
        assert isinstance(claim, MicrobatchClaim)
        if claim.step >= first and claim.stage == 1:
            total += 1
            over += claim.owner.sid.endswith("-s1-r1") and claim.upstream.endswith("-s0-r0")
    late = [seconds[step] for step in seconds if step >= first]
    return Found(statistics.median(late), over / total, record.weights.sha256)


async def measure(arguments: argparse.Namespace) -> dict[str, list[Found]]:
    """All kinds in turn, in one mesh."""
    found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        data, shaping = folder / "data.bin", folder / "shaping.json"
        data.write_bytes(bytes(range(256)) * 4096)
        os.environ[ENVIRONMENT] = str(shaping)
        link = {"from": "*-s0-r0", "to": "*-s1-r1", "latency_ms": arguments.latency_ms}
        if arguments.loss:
            link["loss"] = arguments.loss
        if arguments.megabytes_per_s:
            link["bytes_per_s"] = arguments.megabytes_per_s * 1e6
        options = MeshOptions(
            state=folder / "state", clusters=("a",), nats_port=0, http_port=0, slots=5, node=node_name()
        )
        async with running_mesh(options, lambda text: None) as running:
            address = find_bus(state=running.folder.path)
            async with (
                AsyncClient(state=running.folder.path) as client,
                Bus.connect(
                    address.servers, name="bench", kind=EntityKind.CLIENT, token=address.token
                ) as bus,
            ):
                for number in range(arguments.rounds):
                    for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                        algorithm, slow = KINDS[kind]
                        if slow:
                            shaping.write_text(json.dumps({"links": [link]}))
                        else:
                            shaping.unlink(missing_ok=True)
                        one = await run(client, bus, spec(algorithm, arguments, data))
                        found[kind].append(one)
                        print(
                            f"  round {number + 1}: {kind:14} {one.step_s * 1e3:6.0f} ms a step, "
                            f"{one.share:.1%} of the microbatches over the link",
                            file=sys.stderr,
                        )
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--latency-ms", type=float, default=300.0)
    parser.add_argument("--megabytes-per-s", type=float, default=0.0, help="0: as fast as it is")
    parser.add_argument("--loss", type=float, default=0.0, help="part of the transfers that break the link")
    parser.add_argument("--pad-ms", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))

    def beside(other: str) -> str:
        ratios = [
            theirs.step_s / mine.step_s
            for mine, theirs in zip(found["routed around"], found[other], strict=True)
        ]
        return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"

    for kind, runs in found.items():
        step_ms, share = (
            statistics.median(one.step_s * 1e3 for one in runs),
            statistics.median(one.share for one in runs),
        )
        print(f"{kind:14} {step_ms:7.0f} ms a step   {share:6.1%} of the microbatches over the link")
    print(f"routed around: {beside('static')} the steps per second of static, {beside('healthy')} of healthy")
    hashes = {one.sha256 for runs in found.values() for one in runs}
    print("weights: " + ("equal in all runs" if len(hashes) == 1 else f"DIFFER: {sorted(hashes)}"))


if __name__ == "__main__":
    main()
