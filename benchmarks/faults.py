"""What faults cost: stalls, goodput, waste, hashes under kills, each figure beside its bar.

    python benchmarks/faults.py [--only stall,freeze,kills,goodput,stage,join,overhead,peers] [--kills 200]

Compute is padded (`workers/models/padded.py`): devices are independent of the cores that they share here,
and a step takes 100 ms or more. Each section has a mesh of its own on this machine, real processes and real
signals through `dmsc.chaos`; each disturbed run is compared with a clean one of the same job. Nothing is
asserted: what misses its bar is marked, and the exit code is 0. JSON goes to `--out`.

A figure that a job's settings decide is measured with the settings that are named, e.g.
`--standby-with parallel.standby=1`; without, as the job stands, and the note says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from dmsc.chaos.plan import Every, FaultKind
from dmsc.chaos.report import Clean, Report, quantile
from dmsc.chaos.run import Chaos, ChaosOptions, open_chaos
from dmsc.composition import node_name
from dmsc.layout import MeshOptions
from dmsc.mesh import running_mesh
from schemas.job import JobSpec

BURNERS_PER_CORE = 4
STATE_BYTES = 100e6
BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the result. `kept` None: no bar, or not measured."""

    section: str
    name: str
    value: float | None
    unit: str
    bar: str = ""
    kept: bool | None = None
    note: str = ""


def at_most(section: str, name: str, value: float | None, unit: str, bar: float, note: str = "") -> Figure:
    kept = None if value is None else value <= bar
    return Figure(section=section, name=name, value=value, unit=unit, bar=f"≤ {bar:g}", kept=kept, note=note)


def at_least(section: str, name: str, value: float | None, unit: str, bar: float, note: str = "") -> Figure:
    kept = None if value is None else value >= bar
    return Figure(section=section, name=name, value=value, unit=unit, bar=f"≥ {bar:g}", kept=kept, note=note)


def not_measured(section: str, name: str, why: str) -> Figure:
    return Figure(section=section, name=name, value=None, unit="", note=f"skipped: {why}")


# --- jobs and meshes --------------------------------------------------------------------------------------
MODEL: dict[str, Any] = {"pad_ms": 10, "layers": 4, "width": 64, "heads": 4, "context": 64}
LARGE: dict[str, Any] = {"pad_ms": 10, "layers": 6, "width": 512, "heads": 8, "context": 16}
"""9.5 million parameters a stage of two: 113 MB of weights and optimizer state."""
CHECKPOINT_EVERY = 10


def job(
    steps: int,
    *,
    stages: int = 2,
    replicas: int = 2,
    model: dict[str, Any] = MODEL,
    settings: Sequence[str] = (),
) -> JobSpec:
    """A padded job: eight microbatches of two samples. `settings`: `key.path=value`, as `--set` has them."""
    body: dict[str, Any] = {
        "name": "bench-faults",
        "model": {"factory": "workers.models.padded:padded_gpt", "args": model},
        "data": {"source": "stdlib:", "sample_tokens": model["context"]},
        "training": {
            "steps": steps,
            "microbatches": 8,
            "microbatch_samples": 2,
            "optimizer": {"lr": 1e-3},
            "seed": 5,
            "validation_microbatches": 0,
            "checkpoint_every": CHECKPOINT_EVERY,
        },
        "parallel": {"stages": stages, "replicas": replicas},
    }
    for setting in settings:
        path, _, value = setting.partition("=")
        below = body
        *keys, last = path.split(".")
        for key in keys:
            below = below.setdefault(key, {})
        below[last] = yaml.safe_load(value)
    return JobSpec.model_validate(body)


@asynccontextmanager
async def mesh() -> AsyncIterator[Chaos]:
    """A mesh of two clusters with four slots each, on free ports, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-", ignore_cleanup_errors=True) as name:
        options = MeshOptions(state=Path(name) / "state", nats_port=0, http_port=0, slots=4, node=node_name())
        async with running_mesh(options, say) as running, open_chaos(running.folder, say) as chaos:
            yield chaos


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


async def disturbed(
    chaos: Chaos, spec: JobSpec, kinds: Sequence[FaultKind], every: Every, arguments: argparse.Namespace,
    *, faults: int | None = None, clean: Clean | None = None,
) -> Report:  # fmt: skip
    """The job clean (unless that is known) and then with faults."""
    clean = clean or await chaos.clean_run(spec)
    options = ChaosOptions(every=every, seed=arguments.seed, kinds=tuple(kinds), faults=faults)
    return await chaos.disturbed_run(spec, options, clean)


def soundness(section: str, report: Report) -> list[Figure]:
    """What must hold in every disturbed run."""
    fired = sum(fault.fired for fault in report.faults)
    note = f"{fired} faults; {'; '.join(report.problems()) or 'weights equal'}"
    return [
        at_most(section, "lost", report.count.lost, "", 0, note),
        at_most(section, "doubled", report.count.doubled, "", 0),
        Figure(
            section=section, name="hash equal", value=float(bool(report.hash_equal)), unit="", bar="= 1",
            kept=report.hash_equal,
        ),
    ]  # fmt: skip


def in_steps(report: Report, q: float) -> float | None:
    stall_s = report.stall_s(q)
    return None if stall_s is None else stall_s / report.clean.step_s


# --- sections ---------------------------------------------------------------------------------------------
async def stall(arguments: argparse.Namespace) -> list[Figure]:
    """SIGKILL of one instance of four (and of data instances), at all phases of a step."""
    every = 12
    async with mesh() as chaos:
        spec = job(every * (arguments.stalls + 1))
        report = await disturbed(
            chaos, spec, [FaultKind.INSTANCE], Every(steps=every), arguments, faults=arguments.stalls
        )
    note = f"{len(report.stalls)} stalls, clean step {report.clean.step_s:.3f} s"
    return [
        at_most("stall", "SIGKILL, stall p50", in_steps(report, 0.5), "steps", 1, note),
        at_most("stall", "SIGKILL, stall p95", in_steps(report, 0.95), "steps", 3),
        at_most("stall", "waste", report.waste.ratio, "×", 1.2, f"the dead had {report.waste.dead_had}"),
        *soundness("stall", report),
    ]


async def freeze(arguments: argparse.Namespace) -> list[Figure]:
    """SIGSTOP of one instance; then no fault at all, but four busy processes per core."""
    every = 25
    async with mesh() as chaos:
        spec = job(every * (arguments.freezes + 1))
        report = await disturbed(
            chaos, spec, [FaultKind.FREEZE], Every(steps=every), arguments, faults=arguments.freezes
        )
    worst = report.stall_s(1.0)
    async with mesh() as chaos:
        evicted, watched_s = await _evictions(chaos, 60 * arguments.minutes)
    return [
        at_most("freeze", "SIGSTOP, worst stall", worst, "s", 1, f"{len(report.stalls)} stalls"),
        *soundness("freeze", report),
        at_most(
            "freeze", "false evictions", evicted, "", 0,
            f"{watched_s / 60:.1f} min at {BURNERS_PER_CORE}× CPU oversubscription (--minutes 10 for all)",
        ),
    ]  # fmt: skip


async def _evictions(chaos: Chaos, seconds: float) -> tuple[int, float]:
    """Faults that a job tells of while the machine is overloaded and nobody is killed."""
    told = 0
    record = await chaos.client.submit(job(1_000_000))
    began: float | None = None
    with burning():
        async for event in chaos.client.events(record.job):
            if event.result is not None:
                began = began or time.monotonic()
                if time.monotonic() - began > seconds:
                    break
            if event.kind == "fault":
                say(event.text)
                told += 1
            if event.state is not None and event.state in ("failed", "cancelled"):
                told += 1
                break
    await chaos.client.cancel(record.job)
    return told, time.monotonic() - (began or time.monotonic())


@contextmanager
def burning() -> Iterator[None]:
    """Busy processes, four per core, for as long as the block lasts."""
    count = BURNERS_PER_CORE * (psutil.cpu_count() or 1)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
        assert all(burner.poll() is None for burner in burners), "the load went away"
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def kills(arguments: argparse.Namespace) -> list[Figure]:
    """The soak: random kills of everything."""
    every = 8
    kinds = [FaultKind.INSTANCE, FaultKind.CLUSTER, FaultKind.ORCHESTRATOR, FaultKind.SERVER]
    async with mesh() as chaos:
        spec = job(every * (arguments.kills + 1), model={**MODEL, "pad_ms": 4})
        report = await disturbed(chaos, spec, kinds, Every(steps=every), arguments, faults=arguments.kills)
    return soundness("kills", report)


async def goodput(arguments: argparse.Namespace) -> list[Figure]:
    """Four instances, one killed every 10 s."""
    async with mesh() as chaos:
        clean = await chaos.clean_run(job(60))
        spec = job(max(60, round(arguments.seconds * clean.steps_per_s)))
        clean = Clean(
            step_s=clean.step_s, steps_per_s=clean.steps_per_s, job=clean.job
        )  # another length: no hash
        report = await disturbed(
            chaos, spec, [FaultKind.INSTANCE], Every(seconds=10.0), arguments, clean=clean
        )
    note = f"{len(report.faults)} kills, one every 10 s"
    return [
        at_least("goodput", "goodput", report.goodput, "", 0.85, note),
        at_most("goodput", "waste", report.waste.ratio, "×", 1.2),
    ]


async def stage(arguments: argparse.Namespace) -> list[Figure]:
    """A stage loses all that it has: one replica each, both ways to bring it back."""
    found = []
    variants = (
        ("from a standby", arguments.standby_with, "s", 1.0),
        ("from a peer copy", arguments.copy_with, "steps", 2.0),
    )
    for name, settings, unit, bar in variants:
        async with mesh() as chaos:
            spec = job(30 * 4, replicas=1, settings=settings)
            report = await disturbed(chaos, spec, [FaultKind.STAGE], Every(steps=29), arguments, faults=3)
        worst = report.stall_s(1.0) if unit == "s" else in_steps(report, 1.0)
        how = ", ".join(settings) if settings else "as the job stands, from its last checkpoint"
        found.append(at_most("stage", f"whole stage back {name}", worst, unit, bar, how))
        found += soundness("stage", report)
    return found


async def join(arguments: argparse.Namespace) -> list[Figure]:
    """A newcomer takes its state from a replica: what do the others' steps lose by that?

    The cost is the longest of the faulted step and of those until the next fault, less the median of the
    latter: wherever the newcomer is let in, it is in one of them.
    """
    every = 15
    async with mesh() as chaos:
        spec = job(every * (arguments.joins + 1), model=LARGE)
        report = await disturbed(
            chaos, spec, [FaultKind.INSTANCE], Every(steps=every), arguments, faults=arguments.joins
        )
        weights = await chaos.client.weights(report.job)
    state_mb = weights.bytes / 4 * BYTES_PER_PARAMETER / spec.parallel.stages / 1e6
    if state_mb * 1e6 < STATE_BYTES:
        sys.exit(f"join: {state_mb:.0f} MB of state per stage, {STATE_BYTES / 1e6:.0f} are wanted")
    seconds = {one.step: one.seconds for one in report.advances}
    costs = []
    for one in report.stalls:
        window = [seconds[step] for step in range(one.step + 1, one.step + every) if step in seconds]
        if window:
            costs.append((max(one.seconds, *window) - statistics.median(window)) / report.clean.step_s)
    note = f"{state_mb:.0f} MB of state per stage, clean step {report.clean.step_s:.3f} s, {len(costs)} joins"
    cost = quantile(costs, 0.5) if costs else None
    return [
        at_most("join", "a join costs the others, p50", cost, "steps", 1, note),
        *soundness("join", report),
    ]


async def overhead(arguments: argparse.Namespace) -> list[Figure]:
    """Without any fault: the job as it stands against the same without what makes it survive one."""
    name = "fault-free overhead"
    if not arguments.without:
        why = "--without KEY=VALUE says what switches fault tolerance off"
        return [not_measured("overhead", name, why)]
    ratios = []
    async with mesh() as chaos:
        for number in range(arguments.rounds):
            specs = [job(60), job(60, settings=arguments.without)]
            figures = [await chaos.clean_run(each) for each in (specs if number % 2 == 0 else specs[::-1])]
            ours, bare = figures if number % 2 == 0 else figures[::-1]
            ratios.append(100 * (ours.step_s / bare.step_s - 1))
    note = f"against {', '.join(arguments.without)}; {min(ratios):.1f} to {max(ratios):.1f}"
    return [at_most("overhead", name, statistics.median(ratios), "%", 3, note)]


async def peers(arguments: argparse.Namespace) -> list[Figure]:
    """Four data-parallel processes, one killed every 10 s: the mesh, torchrun and torchft, in turn."""
    import elastic_peers  # type: ignore[import-not-found,unused-ignore]  # beside this file; only here

    workload = {
        **MODEL, "microbatches": 8, "microbatch_samples": 2, "checkpoint_every": CHECKPOINT_EVERY, "ranks": 4,
    }  # fmt: skip
    found: dict[str, list[float]] = {"mesh": [], "torchrun": [], "torchft": []}
    skipped = {peer: why for peer in ("torchrun", "torchft") if (why := elastic_peers.missing(peer))}
    for number in range(arguments.rounds):
        order = [name for name in found if name not in skipped]
        for name in reversed(order) if number % 2 else order:
            say(f"round {number + 1}/{arguments.rounds}: {name}")
            if name == "mesh":
                value = await _mesh_goodput(arguments)
            else:
                try:
                    rates = [
                        await asyncio.to_thread(
                            elastic_peers.rate, name, workload, seconds, every_s, arguments.seed + number
                        )
                        for seconds, every_s in ((arguments.seconds / 2, None), (arguments.seconds, 10.0))
                    ]
                except elastic_peers.NeverAtWork as error:
                    skipped[name] = str(error)
                    continue
                value = rates[1] / rates[0]
            say(f"{name}: goodput {value:.2f}")
            found[name].append(value)
    figures = []
    for name, values in found.items():
        if not values:
            figures.append(not_measured("peers", f"{name}, goodput", skipped.get(name, "")))
            continue
        note = f"4 replicas, a kill every 10 s; {min(values):.2f} to {max(values):.2f}"
        value = statistics.median(values)
        if name == "mesh":
            figures.append(at_least("peers", "mesh 1×4, goodput", value, "", 0.85, note))
        else:
            figures.append(Figure(section="peers", name=f"{name}, goodput", value=value, unit="", note=note))
    return figures


async def _mesh_goodput(arguments: argparse.Namespace) -> float:
    async with mesh() as chaos:
        clean = await chaos.clean_run(job(40, stages=1, replicas=4))
        spec = job(max(40, round(arguments.seconds * clean.steps_per_s)), stages=1, replicas=4)
        clean = Clean(step_s=clean.step_s, steps_per_s=clean.steps_per_s, job=clean.job)
        report = await disturbed(
            chaos, spec, [FaultKind.INSTANCE], Every(seconds=10.0), arguments, clean=clean
        )
    return report.goodput or 0.0


SECTIONS: dict[str, Callable[[argparse.Namespace], Awaitable[list[Figure]]]] = {
    section.__name__: section for section in (stall, freeze, kills, goodput, stage, join, overhead, peers)
}


def show(figure: Figure) -> None:
    mark = {True: "✓", False: "✗", None: " "}[figure.kept]
    value = "–" if figure.value is None else f"{figure.value:.2f}".rstrip("0").rstrip(".")
    print(
        f"{mark} {figure.section:9} {figure.name:32} {value:>8} {figure.unit:6} {figure.bar:7} {figure.note}",
        flush=True,
    )


def chosen(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in SECTIONS]
    if wrong or not names:
        raise argparse.ArgumentTypeError(f"{wrong or 'nothing'}: choose from {', '.join(SECTIONS)}")
    return names


async def measure(arguments: argparse.Namespace) -> list[Figure]:
    figures = []
    for name in arguments.only:
        say(f"{name}: {str(SECTIONS[name].__doc__).splitlines()[0]}")
        for figure in await SECTIONS[name](arguments):
            show(figure)
            figures.append(figure)
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", type=chosen, default=list(SECTIONS), help="sections, with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stalls", type=int, default=20, help="kills in `stall`")
    parser.add_argument("--freezes", type=int, default=5)
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--kills", type=int, default=24, help="kills in the soak; 200 for all")
    parser.add_argument("--minutes", type=float, default=2.0, help="of oversubscription; 10 for all")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each run with a kill every 10 s")
    parser.add_argument("--rounds", type=int, default=1, help="of `peers` and `overhead`, interleaved")
    for name, about in (("standby", "a standby"), ("copy", "peer copies")):
        parser.add_argument(
            f"--{name}-with", action="append", default=[], metavar="KEY=VALUE", help=f"gives the job {about}"
        )
    parser.add_argument(
        "--without", action="append", default=[], metavar="KEY=VALUE", help="switches fault tolerance off"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench-faults.json"))
    arguments = parser.parse_args()
    from bus.logs import configure_logging

    configure_logging(level="error")
    figures = asyncio.run(measure(arguments))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    print(f"written to {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
