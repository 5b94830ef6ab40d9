"""The sections of `faults.py`: each measures one promise about faults, and adds its figures to the sheet."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import psutil
import yaml

from benchmarks import elastic_peers
from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.jobs import job as job_spec
from benchmarks.harness.meshes import open_mesh
from dmsc.chaos.plan import Every, FaultKind
from dmsc.chaos.report import ChaosReport, Clean, own_clean, quantile
from dmsc.chaos.run import Chaos, ChaosOptions, open_chaos
from schemas.job import ENDED, JobSpec

BURNERS_PER_CORE = 4
STATE_BYTES = 100e6
BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""
KILLS_PER_JOB = 50
STEP_S = 0.1
"""The shortest step that counts."""

MODEL: dict[str, Any] = {"pad_ms": 10, "layers": 4, "width": 64, "heads": 4, "context": 64}
LARGE: dict[str, Any] = {"pad_ms": 20, "layers": 6, "width": 512, "heads": 8, "context": 8}
"""9.5 million parameters a stage of two: 113 MB of weights and optimizer state. Few tokens and long waits:
what is computed per parameter (sums, all-reduce, optimizer) already takes much of two cores."""
MIDDLE: dict[str, Any] = {"pad_ms": 10, "layers": 6, "width": 256, "heads": 8, "context": 8}
"""2.4 million parameters a stage of two."""
CHECKPOINT_EVERY = 10


# --- jobs and meshes --------------------------------------------------------------------------------------
def job(
    steps: int,
    *,
    stages: int = 2,
    replicas: int = 2,
    model: dict[str, Any] = MODEL,
    settings: Sequence[str] = (),
) -> JobSpec:
    """A padded job: eight microbatches of two samples. `settings`: `key.path=value`, as `--set` has them."""
    body = job_spec(
        "bench-faults",
        steps=steps,
        samples=2,
        **model,
        training={"optimizer": {"lr": 1e-3}, "seed": 5, "checkpoint_every": CHECKPOINT_EVERY},
        stages=stages,
        replicas=replicas,
    )
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
    async with open_mesh(tell=say) as mesh, open_chaos(mesh.running.folder, say) as chaos:
        yield chaos


async def disturbed(
    chaos: Chaos,
    spec: JobSpec,
    kinds: Sequence[FaultKind],
    every: Every,
    seed: int,
    *,
    faults: int | None = None,
    clean: Clean | None = None,
) -> ChaosReport:
    """The job clean (unless that is known) and then with faults."""
    clean = clean or await chaos.clean_run(spec)
    if clean.step_s < STEP_S:
        raise RuntimeError(f"a clean step takes {clean.step_s:.3f} s, which is too short to measure by")
    options = ChaosOptions(every=every, seed=seed, kinds=tuple(kinds), faults=faults)
    return await chaos.disturbed_run(spec, options, clean)


def plan_of(section: str, *reports: ChaosReport) -> Plan:
    fired = sum(fault.fired for report in reports for fault in report.faults)
    return Plan(section=section, seed=reports[0].seed, fired=fired)


def sound(sheet: FaultSheet, section: str, *reports: ChaosReport) -> None:
    """What must hold in every disturbed run."""
    plan = plan_of(section, *reports)
    problems = [problem for report in reports for problem in report.problems()]
    note = "; ".join(problems) or f"{sum(report.steps for report in reports)} steps"
    equal = sum(report.hash_equal is True for report in reports)
    sheet.add(
        plan.at_most("lost", sum(report.count.lost for report in reports), "", 0, note),
        plan.at_most("doubled", sum(report.count.doubled for report in reports), "", 0),
        plan.equal("hash equal", equal == len(reports), f"{equal} of {len(reports)} jobs"),
    )


def in_steps(report: ChaosReport, q: float) -> float | None:
    stall_s = report.stall_s(q)
    return None if stall_s is None else stall_s / report.clean.step_s


def beside_neighbours(report: ChaosReport, around: int = 4) -> list[float]:
    """Each faulted step's stall, in steps, beside the undisturbed ones near it: the machine may be shared."""
    hit = {stall.step for stall in report.stalls}
    found = []
    for stall in report.stalls:
        near = [
            advance.seconds
            for advance in report.advances
            if advance.step not in hit and abs(advance.step - stall.step) <= around
        ]
        usual_s = statistics.median(near or [report.clean.step_s])
        found.append((stall.seconds - usual_s) / usual_s)
    return found


def clean_step(report: ChaosReport) -> str:
    return f"clean step {report.clean.step_s:.3f} s"


# --- sections ---------------------------------------------------------------------------------------------
async def stall(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """SIGKILL of one instance of four (and of data instances), at all phases of a step."""
    every = 12
    async with mesh() as chaos:
        spec = job(every * (arguments.stalls + 1))
        report = await disturbed(
            chaos, spec, [FaultKind.INSTANCE], Every(steps=every), arguments.seed, faults=arguments.stalls
        )
    plan = plan_of("stall", report)
    sheet.add(
        plan.at_most("SIGKILL, stall p50", in_steps(report, 0.5), "steps", 1, clean_step(report)),
        plan.at_most("SIGKILL, stall p95", in_steps(report, 0.95), "steps", 3),
        plan.at_most("waste", report.waste.ratio, "×", 1.2, f"the dead had {report.waste.dead_had}"),
    )
    sound(sheet, "stall", report)


async def data(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """SIGKILL of data and preprocessing instances, at all phases of a step of 0.4 s."""
    every = 10
    function = "function: extract, args: {fields: [inputs, targets]}, replicas: 2"
    chain = f"data.preprocess=[{{name: first, {function}}}, {{name: second, {function}}}]"
    spec = job(every * (arguments.data_kills + 1), settings=[chain])
    async with mesh() as chaos:
        report = await disturbed(
            chaos, spec, [FaultKind.DATA], Every(steps=every), arguments.seed, faults=arguments.data_kills
        )
    plan = plan_of("data", report)
    stalls = beside_neighbours(report)
    usual_s = statistics.median(advance.seconds for advance in report.advances)
    note = f"{clean_step(report)}; usual one of this run {usual_s:.3f} s"
    sheet.add(
        plan.at_most("SIGKILL, stall p50", quantile(stalls, 0.5), "steps", 1, note),
        plan.at_most("SIGKILL, stall p95", quantile(stalls, 0.95), "steps", 1, "beside the steps around"),
        plan.figure("the same beside the clean run, p95", in_steps(report, 0.95), "steps"),
    )
    sound(sheet, "data", report)


async def freeze(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """SIGSTOP of one instance; then no fault at all, but four busy processes per core."""
    every = 25
    async with mesh() as chaos:
        spec = job(every * (arguments.freezes + 1))
        report = await disturbed(
            chaos, spec, [FaultKind.FREEZE], Every(steps=every), arguments.seed, faults=arguments.freezes
        )
    plan = plan_of("freeze", report)
    sheet.add(plan.at_most("SIGSTOP, worst stall", report.stall_s(1.0), "s", 1, clean_step(report)))
    sound(sheet, "freeze", report)
    async with mesh() as chaos:
        evicted, steps, watched_s = await _evictions(chaos, 60 * arguments.minutes)
    note = f"{watched_s / 60:.1f} min at {BURNERS_PER_CORE}× CPU oversubscription, {steps} steps"
    sheet.add(Plan(section="freeze").at_most("false evictions", evicted, "", 0, note))


async def _evictions(chaos: Chaos, seconds: float) -> tuple[int, int, float]:
    """Instances that a job lost while the machine was overloaded and nobody was killed; steps; seconds.

    Raises:
        RuntimeError: the job ended, or the load did.
    """
    record = await chaos.client.submit(job(1_000_000))
    began: float | None = None
    steps = 0
    with burning():
        async for event in chaos.client.events(record.job):
            if event.kind in ("fault", "recovery"):
                say(event.text)
            if event.state in ENDED:
                raise RuntimeError(f"the job ended {event.state}: {event.text}")
            if event.result is not None:
                began = began or time.monotonic()
                steps += 1
                if time.monotonic() - began > seconds:
                    break
    lost = (await chaos.client.job(record.job)).recoveries
    await chaos.client.cancel(record.job)
    return lost, steps, time.monotonic() - (began or time.monotonic())


@contextmanager
def burning() -> Iterator[None]:
    """Busy processes, four per core, for as long as the block lasts. Raises `RuntimeError` if one ended."""
    count = BURNERS_PER_CORE * (psutil.cpu_count() or 1)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
        if any(burner.poll() is not None for burner in burners):
            raise RuntimeError("the load went away")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def kills(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """The soak: random kills of instances, clusters, the control plane and the bus's server."""
    every = 8
    kinds = [FaultKind.INSTANCE, FaultKind.CLUSTER, FaultKind.ORCHESTRATOR, FaultKind.SERVER]
    sizes = [min(KILLS_PER_JOB, arguments.kills - done) for done in range(0, arguments.kills, KILLS_PER_JOB)]
    cleans: dict[int, Clean] = {}
    reports: list[ChaosReport] = []
    try:
        for number, size in enumerate(sizes):
            spec = job(every * (size + 1), model={**MODEL, "pad_ms": 5})
            async with mesh() as chaos:
                if size not in cleans:
                    cleans[size] = await chaos.clean_run(spec)
                report = await disturbed(
                    chaos,
                    spec,
                    kinds,
                    Every(steps=every),
                    arguments.seed + number,
                    faults=size,
                    clean=cleans[size],
                )
            reports.append(report)
            fired = sum(fault.fired for fault in report.faults)
            say(f"kills: job {number + 1} of {len(sizes)}: {fired} kills; {report.problems() or 'sound'}")
    finally:
        if reports:
            sound(sheet, "kills", *reports)


async def goodput(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """Four instances, one killed every 10 s."""
    report = await _killed_every_10_s(arguments.seconds, arguments.seed, stages=2, replicas=2)
    plan = plan_of("goodput", report)
    sheet.add(
        plan.at_least("goodput, a kill every 10 s", report.goodput, "", 0.85, clean_step(report)),
        plan.at_most("waste", report.waste.ratio, "×", 1.2, f"the dead had {report.waste.dead_had}"),
    )


async def _killed_every_10_s(seconds: float, seed: int, *, stages: int, replicas: int) -> ChaosReport:
    """A job of `seconds`, against shorter clean runs before and after it: the machine may be shared.

    So there is no hash to compare.
    """

    def of(steps: int) -> JobSpec:
        return job(steps, stages=stages, replicas=replicas)

    async with mesh() as chaos:
        before = await chaos.clean_run(of(60))
        clean = Clean(step_s=before.step_s, steps_per_s=before.steps_per_s, job=before.job)
        spec = of(max(60, round(seconds * clean.steps_per_s)))
        report = await disturbed(chaos, spec, [FaultKind.INSTANCE], Every(seconds=10.0), seed, clean=clean)
        if report.state != "done" or report.goodput is None:
            raise RuntimeError(f"the job ended {report.state}: {report.reason}")
        after = await chaos.clean_run(of(60))
    rate = report.goodput * before.steps_per_s
    mean = statistics.mean((before.steps_per_s, after.steps_per_s))
    quiet = own_clean(report.advances, report.faults)
    say(f"clean {before.steps_per_s:.2f} and {after.steps_per_s:.2f} steps/s, with kills {rate:.2f}")
    say(f"steps without a fault took {before.step_s:.3f} and {after.step_s:.3f} s, and {quiet.step_s:.3f} s")
    return replace(report, goodput=rate / mean)


async def stage(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """A stage of one replica loses it: a standby takes over, or the newcomer takes a peer's copy."""
    every = 29
    variants = (
        ("from a standby", "parallel.standbys=1", "takes over", "s", 1.0),
        ("from a peer copy", "parallel.copies=true", "is back from its copy", "steps", 2.0),
    )
    for name, setting, proof, unit, bar in variants:
        async with mesh() as chaos:
            spec = job(every * (arguments.stages + 1), replicas=1, settings=[setting])
            report = await disturbed(
                chaos, spec, [FaultKind.STAGE], Every(steps=every), arguments.seed, faults=arguments.stages
            )
            texts = [e.text async for e in chaos.client.events(report.job) if e.kind == "recovery"]
        plan = plan_of("stage", report)
        ways = sum(proof in text for text in texts)
        worst = report.stall_s(1.0) if unit == "s" else in_steps(report, 1.0)
        sheet.add(
            plan.at_most(f"whole stage back {name}, worst", worst, unit, bar, clean_step(report)),
            plan.equal(f"… and always {name}", ways == plan.fired, f"{ways} times by the job's events"),
        )
        sound(sheet, "stage", report)


async def join(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """A newcomer takes its state from a replica: what do the others' steps lose by that?

    The cost is the longest of the faulted step and of those until the next fault, less the median of the
    latter: wherever the newcomer is let in, it is in one of them. Data instances are killed too, but have no
    state, and do not count. No checkpoints: writing 226 MB through the
    bus's server would take the cores from the steps that are compared.
    """
    every = 12
    settings = ["training.microbatch_samples=1", "training.checkpoint_every=0"]
    async with mesh() as chaos:
        spec = job(every * (arguments.joins + 1), model=LARGE, settings=settings)
        report = await disturbed(
            chaos, spec, [FaultKind.INSTANCE], Every(steps=every), arguments.seed, faults=arguments.joins
        )
        weights = await chaos.client.weights(report.job)
    state_mb = weights.bytes / 4 * BYTES_PER_PARAMETER / spec.parallel.stages / 1e6
    if state_mb * 1e6 < STATE_BYTES:
        raise RuntimeError(f"{state_mb:.0f} MB of state per stage, {STATE_BYTES / 1e6:.0f} are wanted")
    seconds = {one.step: one.seconds for one in report.advances}
    with_state = {fault.number for fault in report.faults if "-data-" not in fault.victim}
    costs = []
    for one in report.stalls:
        window = [seconds[step] for step in range(one.step + 1, one.step + every) if step in seconds]
        if window and with_state.intersection(one.faults):
            costs.append((max(one.seconds, *window) - statistics.median(window)) / report.clean.step_s)
    note = f"{state_mb:.0f} MB of state a stage, {clean_step(report)}, {len(costs)} joins"
    plan = plan_of("join", report)
    cost = quantile(costs, 0.5) if costs else None
    sheet.add(
        plan.at_most("a kill and a join cost the others, p50", cost, "steps", 1, note),
        plan.figure("… at worst", max(costs, default=None), "steps"),
    )
    sound(sheet, "join", report)


async def overhead(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """Without any fault: the job by default against the same without what can be left out of it.

    By the steps per second of whole runs, so that checkpoints are in it; each round runs bare, whole, whole,
    bare, so that a machine whose speed drifts does not count. Retained tensors, votes and the
    recorded decision can't be left out: what they cost is in `benchmarks/training.py`.
    """
    bare = ("training.exact_accumulation=false", "training.checkpoint_every=0")
    ours = ("training.checkpoint_every=auto",)
    shapes: tuple[tuple[str, dict[str, Any], int, tuple[str, ...]], ...] = (
        ("2 × 2, 0.1 M parameters a stage", MODEL, 2, ours),
        ("2 × 2, 2.4 M parameters a stage", MIDDLE, 2, ours),
        ("2 × 1, 2.4 M, copies at peers", MIDDLE, 1, (*ours, "parallel.copies=true")),
    )
    ratios: dict[str, list[float]] = {name: [] for name, *_ in shapes}
    try:
        async with mesh() as chaos:
            for number in range(arguments.rounds):
                for name, model, replicas, whole in shapes:
                    took = []
                    for settings in (bare, whole, whole, bare):
                        spec = job(40, replicas=replicas, model=model, settings=settings)
                        took.append(1 / (await chaos.clean_run(spec)).steps_per_s)
                    ratios[name].append(100 * ((took[1] + took[2]) / (took[0] + took[3]) - 1))
                    say(f"overhead: round {number + 1}: {name}: {ratios[name][-1]:.1f} %")
    finally:
        for name, found in ratios.items():
            if found:
                note = f"{_spread(found)}, against {', '.join(bare)}"
                sheet.add(Plan(section="overhead").at_most(name, statistics.median(found), "%", 3, note))


def _spread(found: Sequence[float]) -> str:
    return f"{min(found):.2f} to {max(found):.2f} in {len(found)} rounds"


async def peers(arguments: argparse.Namespace, sheet: FaultSheet) -> None:
    """Four data-parallel processes, one killed every 10 s: the mesh, torchrun and torchft, in turn."""
    workload = {
        **MODEL,
        "microbatches": 8,
        "microbatch_samples": 2,
        "checkpoint_every": CHECKPOINT_EVERY,
        "ranks": 4,
    }
    found: dict[str, list[float]] = {"mesh": [], "torchrun": [], "torchft": []}
    skipped = {peer: why for peer in ("torchrun", "torchft") if (why := elastic_peers.missing(peer))}
    try:
        for number in range(arguments.rounds):
            order = [name for name in found if name not in skipped]
            for name in reversed(order) if number % 2 else order:
                say(f"round {number + 1}/{arguments.rounds}: {name}")
                seed = arguments.seed + number
                try:
                    value = await _goodput_of(name, workload, arguments.seconds, seed)
                except elastic_peers.NeverAtWork as error:
                    skipped[name] = str(error)
                    continue
                say(f"{name}: goodput {value:.2f}")
                found[name].append(value)
    finally:
        for name, values in found.items():
            _tell_peer(sheet, arguments, name, values, skipped.get(name, "not measured"))


def _tell_peer(
    sheet: FaultSheet, arguments: argparse.Namespace, name: str, values: Sequence[float], why: str
) -> None:
    title = f"{name} 1 × 4, goodput"
    if not values:
        sheet.add(Plan(section="peers").figure(title, None, note=f"skipped: {why}"))
        return
    plan = Plan(section="peers", seed=arguments.seed)
    note = f"a kill every 10 s, {arguments.seconds:g} s; {_spread(values)}"
    value = statistics.median(values)
    if name == "mesh":
        sheet.add(plan.at_least(title, value, "", 0.85, note))
    else:
        sheet.add(plan.figure(title, value, note=note))


async def _goodput_of(name: str, workload: dict[str, Any], seconds: float, seed: int) -> float:
    if name == "mesh":
        report = await _killed_every_10_s(seconds, seed, stages=1, replicas=4)
        return report.goodput or 0.0
    before, killed, after = [
        await asyncio.to_thread(elastic_peers.rate, name, workload, length_s, every_s, seed)
        for length_s, every_s in ((seconds / 3, None), (seconds, 10.0), (seconds / 3, None))
    ]
    say(f"clean {before:.1f} and {after:.1f} samples/s, with kills {killed:.1f}")
    return float(killed / statistics.mean((before, after)))


SECTIONS: dict[str, Callable[[argparse.Namespace, FaultSheet], Awaitable[None]]] = {
    section.__name__: section
    for section in (stall, data, freeze, kills, goodput, stage, join, overhead, peers)
}
