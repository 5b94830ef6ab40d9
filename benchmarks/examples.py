"""Each example of examples/ in one mesh: as one process, as 2 × 2 with a kill, and resumed from the middle.

    python -m benchmarks.examples [--only digits,unet] [--replicas 2,4 --kills 10] [--set KEY=VALUE] [--plain]

Their data is made first. A row per example: losses, seconds, recoveries, and the SHA-256 of all runs.
`--replicas 2,4` has one run of two stages for each number, all with kills. `--set` changes a key of each
example's job, as of `dmsc train`: `--set training.precision=bf16`, `--set training.compile=all`. With
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command, say, some_of
from benchmarks.harness.jobs import digest, done
from benchmarks.harness.meshes import open_mesh
from bus.logs import configure_logging
from dmsc import AsyncClient
from dmsc.client.job_file import load_job
from schemas.errors import BadJob, Conflict, NotFound
from schemas.job import JobRecord, JobSpec

ROOT = Path(__file__).parents[1]
PLAIN_STEPS, PLAIN_BAR = 50, 1e-6
NAMES = tuple(sorted(file.parent.name for file in (ROOT / "examples").glob("*/job.yaml")))


@dataclass(frozen=True)
class KilledRun:
    """One run as two stages, of so many replicas each, with kills."""

    replicas: int
    seconds: float
    kills: int
    recoveries: int
    digest: str


@dataclass(frozen=True)
class ExampleFigures:
    """What one example showed. The digests are of the weights as one process, with kills, and resumed."""

    name: str
    first_loss: float
    last_loss: float
    whole_s: float
    resumed_s: float
    killed: tuple[KilledRun, ...]
    digest: str
    resumed_digest: str

    @property
    def digests(self) -> tuple[str, ...]:
        return self.digest, *(run.digest for run in self.killed), self.resumed_digest

    @property
    def same(self) -> bool:
        return len(set(self.digests)) == 1


def jobs(names: Sequence[str], overrides: Sequence[str]) -> dict[str, JobSpec]:
    """Name → job of each of these examples.

    Raises:
        SystemExit: In one line: an override fits none of their keys.
    """
    try:
        return {name: load_job(ROOT / "examples" / name / "job.yaml", overrides) for name in names}
    except BadJob as error:
        raise SystemExit(error.text) from None


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


async def killed_run(
    client: AsyncClient, spec: JobSpec, replicas: int, kills: int
) -> tuple[KilledRun, JobRecord]:
    """One example as two stages, with kills.

    Raises:
        SystemExit: The job failed, or a kill came too late.
    """
    record, seconds, struck = await trained(client, shaped(spec, 2, replicas), kills)
    found = KilledRun(replicas, seconds, struck, record.recoveries, digest(record))
    if struck < kills or (kills and not record.recoveries):
        raise SystemExit(
            f"{record.job}: {struck} of {kills} kills and {record.recoveries} recoveries: too late"
        )
    return found, record


async def example(
    client: AsyncClient, name: str, spec: JobSpec, replicas: Sequence[int], kills: int
) -> ExampleFigures:
    """One example as one process, as two stages of each of these numbers of replicas, and resumed.

    Raises:
        SystemExit: A job failed, kept no checkpoint, or a kill came too late.
    """
    await asyncio.to_thread(make_data, name)
    whole, whole_s, _ = await trained(client, shaped(spec, 1, 1))
    before = digest(whole)
    killed = [await killed_run(client, spec, count, kills) for count in replicas]
    last = killed[-1][1]
    kept = (await client.checkpoints(last.job)).checkpoints
    middle = min(kept, key=lambda one: abs(one.manifest.version - spec.training.steps / 2), default=None)
    if middle is None:
        raise SystemExit(f"{last.job} kept no checkpoint")
    again = shaped(spec, 3, 1, resume_from=middle.url, initial_weights=None)
    resumed, resumed_s, _ = await trained(client, again)
    losses = whole.loss_first or math.nan, whole.loss_last or math.nan
    runs = tuple(run for run, _ in killed)
    return ExampleFigures(name, *losses, whole_s, resumed_s, runs, before, digest(resumed))


@dataclass(frozen=True)
class PlainFigures:
    """One example beside a plain loop. `difference` is the largest of a step, relative to losses above 1."""

    name: str
    steps: int
    first_loss: float
    last_loss: float
    difference: float


async def beside_plain(client: AsyncClient, name: str, spec: JobSpec) -> PlainFigures:
    """One example as one process, and its plain loop in a process of its own."""
    await asyncio.to_thread(make_data, name)
    job = (await client.submit(shaped(spec, 1, 1))).job
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
    if options.plain and options.set:
        raise SystemExit("--plain: a plain loop trains the example as its file says; leave out --set")
    specs = jobs(options.only, options.set)
    if options.plain:
        beside = []
        async with open_mesh(tell=say, slots=3) as mesh:
            for name, spec in specs.items():
                beside.append(await beside_plain(mesh.client, name, spec))
                say(plain_row(beside[-1]))
        return beside
    found = []
    async with open_mesh(tell=say, slots=max(options.replicas) + 2) as mesh:
        for name, spec in specs.items():
            found.append(await example(mesh.client, name, spec, options.replicas, options.kills))
            say(row(found[-1]))
    return found


def row(found: ExampleFigures) -> str:
    hashes = found.digest[:16] if found.same else "DIFFER: " + ", ".join(found.digests)
    losses = f"{found.first_loss:7.4f} {found.last_loss:7.4f}"
    killed = " ".join(f"{run.seconds:6.1f} {run.kills:5} {run.recoveries:10}" for run in found.killed)
    return f"{found.name:12} {losses} {found.whole_s:6.1f} {killed} {found.resumed_s:7.1f}  {hashes}"


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
    shapes = " ".join(f"{f'2×{run.replicas} s':>6} kills recoveries" for run in figures[0].killed)
    yield f"{'example':12} {'first':>7} {'last':>7} {'1×1 s':>6} {shapes} {'resumed':>7}  SHA-256 of all"
    yield from map(row, figures)
    if wrong := [one.name for one in figures if not one.same]:
        raise SystemExit(f"the weights differ: {', '.join(wrong)}")


def counts(text: str) -> tuple[int, ...]:
    """The type of an option that takes numbers from 1, with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 1 with commas, such as 2,4")
    return tuple(map(int, parts))


if __name__ == "__main__":
    parser = command(
        __doc__,
        kills=(1, "of each run of two stages, evenly over its steps", 0),
        plain=(False, "compare the losses with a plain PyTorch loop's instead"),
    )
    parser.add_argument("--only", type=some_of(NAMES), default=NAMES, help="some examples, with commas")
    parser.add_argument(
        "--replicas",
        type=counts,
        default=(2,),
        help="of each of two stages that are killed: a run for each",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of each job; repeatable"
    )
    bench(parser, measure, lines)
