"""Each example of examples/ in one mesh: as one process, as 2 × 2 with a kill, and resumed from the middle.

    python -m benchmarks.examples [--only digits,unet] [--replicas 4 --kills 10] [--plain] [--json]

Their data is made first. A row per example: losses, seconds, recoveries, and the SHA-256 of all three. With
`--plain` an example trains as one process only, and each of its first 50 losses is compared with a plain
PyTorch loop's (`benchmarks.plain_loops`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command, say, some_of
from benchmarks.harness.jobs import digest, done
from benchmarks.harness.meshes import open_mesh
from bus.logs import configure_logging
from dmsc import AsyncClient
from dmsc.client.job_file import load_job
from schemas.errors import Conflict, NotFound
from schemas.job import JobRecord, JobSpec

ROOT = Path(__file__).parents[1]
PLAIN_STEPS, PLAIN_BAR = 50, 1e-6
NAMES = tuple(sorted(file.parent.name for file in (ROOT / "examples").glob("*/job.yaml")))


@dataclass(frozen=True)
class ExampleFigures:
    """What one example showed. The digests are of the weights as one process, with kills, and resumed."""

    name: str
    first_loss: float
    last_loss: float
    whole_s: float
    killed_s: float
    resumed_s: float
    kills: int
    recoveries: int
    digests: tuple[str, str, str]

    @property
    def same(self) -> bool:
        return len(set(self.digests)) == 1


def make_data(name: str) -> None:
    """Runs the example's `make_data.py`, if it has one, as its header says: from the folder above."""
    maker = Path("examples", name, "make_data.py")
    if (ROOT / maker).exists():
        subprocess.run([sys.executable, str(maker)], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


def shaped(spec: JobSpec, stages: int, replicas: int, **changes: Any) -> JobSpec:
    parallel = spec.parallel.model_copy(update={"stages": stages, "replicas": replicas})
    training = spec.training.model_copy(update={"checkpoint_every": max(1, spec.training.steps // 4)})
    name = f"{spec.name}-{stages}x{replicas}"
    return spec.model_copy(update={"name": name, "parallel": parallel, "training": training, **changes})


async def trained(client: AsyncClient, spec: JobSpec, kills: int = 0) -> tuple[JobRecord, float, int]:
    """The record at the end, seconds, and kills: evenly over the steps, of each stage and replica in turn."""
    began, done_kills = time.monotonic(), 0
    every = spec.training.steps // (kills + 2)
    parallel = spec.parallel
    replicas = min(parallel.replicas_per_stage())
    victims = [f"s{stage}-r{replica}" for replica in range(replicas) for stage in range(parallel.stages)]
    job = (await client.submit(spec)).job
    async for event in client.events(job):
        if done_kills < kills and event.result is not None and event.result.step >= every * (done_kills + 1):
            for turn in range(len(victims)):
                victim = victims[(done_kills + turn) % len(victims)]
                with contextlib.suppress(Conflict, NotFound):  # on its way back from a kill: the next in turn
                    await client.strike(f"{job}-{victim}", "kill")
                    done_kills += 1
                    break
    return await client.job(job), time.monotonic() - began, done_kills


async def example(client: AsyncClient, name: str, replicas: int, kills: int) -> ExampleFigures:
    """One example in three shapes.

    Raises:
        SystemExit: A job failed, kept no checkpoint, or a kill came too late.
    """
    await asyncio.to_thread(make_data, name)
    spec = load_job(ROOT / "examples" / name / "job.yaml")
    whole, whole_s, _ = await trained(client, shaped(spec, 1, 1))
    killed, killed_s, struck = await trained(client, shaped(spec, 2, replicas), kills)
    before = digest(whole), digest(killed)
    if struck < kills or killed.recoveries == 0:
        raise SystemExit(
            f"{killed.job}: {struck} of {kills} kills and {killed.recoveries} recoveries: too late"
        )
    kept = (await client.checkpoints(killed.job)).checkpoints
    middle = min(kept, key=lambda one: abs(one.manifest.version - spec.training.steps / 2), default=None)
    if middle is None:
        raise SystemExit(f"{killed.job} kept no checkpoint")
    again = shaped(spec, 3, 1, resume_from=middle.url, initial_weights=None)
    resumed, resumed_s, _ = await trained(client, again)
    losses = whole.loss_first or math.nan, whole.loss_last or math.nan
    seconds = whole_s, killed_s, resumed_s
    return ExampleFigures(name, *losses, *seconds, struck, killed.recoveries, (*before, digest(resumed)))


@dataclass(frozen=True)
class PlainFigures:
    """One example beside a plain loop. `difference` is the largest of a step, relative to losses above 1."""

    name: str
    steps: int
    first_loss: float
    last_loss: float
    difference: float


async def beside_plain(client: AsyncClient, name: str) -> PlainFigures:
    """One example as one process, and its plain loop in a process of its own."""
    await asyncio.to_thread(make_data, name)
    spec = shaped(load_job(ROOT / "examples" / name / "job.yaml"), 1, 1)
    job = (await client.submit(spec)).job
    losses = [event.result.loss async for event in client.events(job) if event.result is not None][
        :PLAIN_STEPS
    ]
    done(await client.job(job))
    command = [sys.executable, "-m", "benchmarks.plain_loops", name, str(PLAIN_STEPS)]
    ran = await asyncio.to_thread(subprocess.run, command, check=True, cwd=ROOT, stdout=subprocess.PIPE)
    plain: list[float] = json.loads(ran.stdout.splitlines()[-1])
    worst = max(abs(own - their) / max(1.0, their) for own, their in zip(losses, plain, strict=True))
    return PlainFigures(name, len(plain), plain[0], plain[-1], worst)


async def measure(options: argparse.Namespace) -> list[ExampleFigures] | list[PlainFigures]:
    configure_logging(level="error")
    if options.plain:
        beside = []
        async with open_mesh(tell=say, slots=3) as mesh:
            for name in options.only:
                beside.append(await beside_plain(mesh.client, name))
                say(plain_row(beside[-1]))
        return beside
    found = []
    async with open_mesh(tell=say, slots=options.replicas + 2) as mesh:
        for name in options.only:
            found.append(await example(mesh.client, name, options.replicas, options.kills))
            say(row(found[-1]))
    return found


def row(found: ExampleFigures) -> str:
    hashes = found.digests[0][:16] if found.same else "DIFFER: " + ", ".join(found.digests)
    losses = f"{found.first_loss:7.4f} {found.last_loss:7.4f}"
    seconds = f"{found.whole_s:6.1f} {found.killed_s:6.1f} {found.resumed_s:7.1f}"
    return f"{found.name:12} {losses} {seconds} {found.kills:5} {found.recoveries:10}  {hashes}"


def plain_row(found: PlainFigures) -> str:
    losses = f"{found.first_loss:7.4f} {found.last_loss:7.4f}"
    return f"{found.name:12} {found.steps:5} {losses} {found.difference:10.1e}"


def lines(found: list[ExampleFigures] | list[PlainFigures]) -> Iterator[str]:
    beside = [each for each in found if isinstance(each, PlainFigures)]
    if beside:
        yield f"{'example':12} {'steps':>5} {'first':>7} {'last':>7} {'difference':>10}"
        yield from map(plain_row, beside)
        if far := [each.name for each in beside if not each.difference <= PLAIN_BAR]:
            raise SystemExit(f"a plain loop's losses differ by more than {PLAIN_BAR:g}: {', '.join(far)}")
        return
    figures = [each for each in found if isinstance(each, ExampleFigures)]
    yield (
        f"{'example':12} {'first':>7} {'last':>7} {'1×1 s':>6} {'kill s':>6} {'resumed':>7} kills recoveries"
        "  SHA-256 of all"
    )
    yield from map(row, figures)
    if wrong := [one.name for one in figures if not one.same]:
        raise SystemExit(f"the weights differ: {', '.join(wrong)}")


if __name__ == "__main__":
    parser = command(
        __doc__,
        replicas=(2, "of each of the two stages that are killed"),
        kills=(1, "evenly over the steps"),
        plain=(False, "compare the losses with a plain PyTorch loop's instead"),
    )
    parser.add_argument("--only", type=some_of(NAMES), default=NAMES, help="some examples, with commas")
    bench(parser, measure, lines)
