"""Each example of examples/ in one mesh: as one process, and as 2 × 2 with a kill. One SHA-256 for both.

    python -m benchmarks.examples [--only digits,unet] [--json]

Their data is made first. A row per example: losses, seconds, what the kill was.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import bench, command, say, some_of
from benchmarks.harness.jobs import digest
from benchmarks.harness.meshes import open_mesh
from bus.logs import configure_logging
from dmsc import AsyncClient
from dmsc.client.job_file import load_job
from schemas.job import JobRecord, JobSpec

ROOT = Path(__file__).parents[1]
NAMES = tuple(sorted(file.parent.name for file in (ROOT / "examples").glob("*/job.yaml")))


@dataclass(frozen=True)
class ExampleFigures:
    """What one example showed. The digests are of the weights as one process, and as 2 × 2 with a kill."""

    name: str
    first_loss: float
    last_loss: float
    whole_s: float
    killed_s: float
    recoveries: int
    digests: tuple[str, str]

    @property
    def same(self) -> bool:
        return self.digests[0] == self.digests[1]


def make_data(name: str) -> None:
    """Runs the example's `make_data.py`, if it has one, as its header says: from the folder above."""
    maker = Path("examples", name, "make_data.py")
    if (ROOT / maker).exists():
        subprocess.run([sys.executable, str(maker)], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


def shaped(spec: JobSpec, stages: int, replicas: int) -> JobSpec:
    parallel = spec.parallel.model_copy(update={"stages": stages, "replicas": replicas})
    return spec.model_copy(update={"name": f"{spec.name}-{stages}x{replicas}", "parallel": parallel})


async def trained(client: AsyncClient, spec: JobSpec, victim: str = "") -> tuple[JobRecord, float]:
    """The record at the end, and seconds. `victim` is killed after a third of the steps."""
    began = time.monotonic()
    job = (await client.submit(spec)).job
    async for event in client.events(job):
        if victim and event.result is not None and event.result.step >= spec.training.steps // 3:
            await client.strike(f"{job}-{victim}", "kill")
            victim = ""
    return await client.job(job), time.monotonic() - began


async def measure(options: argparse.Namespace) -> list[ExampleFigures]:
    configure_logging(level="error")
    found = []
    async with open_mesh(tell=say) as mesh:
        for number, name in enumerate(options.only):
            await asyncio.to_thread(make_data, name)
            spec = load_job(ROOT / "examples" / name / "job.yaml")
            whole, whole_s = await trained(mesh.client, shaped(spec, 1, 1))
            victim = f"s{number % 2}-r{number // 2 % 2}"
            killed, killed_s = await trained(mesh.client, shaped(spec, 2, 2), victim)
            digests = digest(whole), digest(killed)
            if killed.recoveries == 0:
                raise SystemExit(f"{killed.job}: the kill of {victim} cost it nothing, so it came too late")
            losses = whole.loss_first or float("nan"), whole.loss_last or float("nan")
            found.append(ExampleFigures(name, *losses, whole_s, killed_s, killed.recoveries, digests))
            say(row(found[-1]))
    return found


def row(found: ExampleFigures) -> str:
    hashes = found.digests[0][:16] if found.same else "DIFFER: " + ", ".join(found.digests)
    losses = f"{found.first_loss:8.4f} {found.last_loss:8.4f}"
    return (
        f"{found.name:12} {losses} {found.whole_s:7.1f} {found.killed_s:7.1f} {found.recoveries:5}  {hashes}"
    )


def lines(found: list[ExampleFigures]) -> Iterator[str]:
    yield f"{'example':12} {'first':>8} {'last':>8} {'1×1 s':>7} {'2×2 s':>7} {'kills':>5}  SHA-256 of both"
    yield from map(row, found)
    if wrong := [one.name for one in found if not one.same]:
        raise SystemExit(f"the weights differ: {', '.join(wrong)}")


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--only", type=some_of(NAMES), default=NAMES, help="some examples, with commas")
    bench(parser, measure, lines)
