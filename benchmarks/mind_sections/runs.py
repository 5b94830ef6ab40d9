"""One job under one script: its steps in the calm before, and from the script's beginning to its end."""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured, some
from benchmarks.harness.emulation import EmulatedSlots
from benchmarks.harness.jobs import job
from benchmarks.harness.meshes import BenchMesh
from benchmarks.harness.processes import child, modules
from benchmarks.mind_sections.oracle import PaddedJob, Span, gain_at, possible_steps
from benchmarks.mind_sections.scenarios import Deed, Scenario, Slot, SlotScripts
from bus.subjects import POLICY_DECISION
from dmsc.process.composition import node_name
from schemas.errors import DmscError
from schemas.job import JobSpec
from schemas.policy import PolicyDecision

CALM_S = 12.0
"""Before the script begins: modules see some steps by then. The second half is measured: until then links are
built, routes are learnt, and the queue gives a job the replicas that it may have."""
TAIL = 1.5
"""Measured span in lengths of the script."""
JOINED_SLOTS = 2
READY, READY_S = "module ready", 60.0
MICROBATCHES = 12
IN_A_ROW, NEAR = 4, 0.9


@dataclass(frozen=True, kw_only=True)
class ChangeFigure:
    """A change that was forecast: seconds of a step."""

    what: str
    by: str
    forecast_s: float
    before_s: float
    after_s: float | None
    state: str

    @property
    def expected_gain(self) -> float:
        return 1.0 - self.forecast_s / self.before_s

    @property
    def error(self) -> float | None:
        """Of the forecast step, beside what was measured; None: it was not measured."""
        return None if self.after_s is None else abs(self.forecast_s / self.after_s - 1.0)


@dataclass(frozen=True, kw_only=True)
class MindRun:
    """Steps per second: before the script, under it, and as many as were possible."""

    mode: str
    number: int
    before: float
    under: float
    possible: float
    by_routes: float
    """As many as the plan of the calm before could do, with the best routes at each moment."""
    changes: tuple[ChangeFigure, ...] = ()
    adopted: tuple[str, ...] = ()
    declined: dict[str, int] = field(default_factory=dict)
    settled: int | None = None
    """Steps from the script's beginning until four in a row took 0.9 of the best rate for the slots as they
    were then; None: that did not come while they were so."""


@dataclass(frozen=True, kw_only=True)
class MindBench:
    """One mesh for all runs of a scenario."""

    mesh: BenchMesh
    scripts: Path
    scenario: Scenario
    lasts_s: float
    pad_ms: float
    calm_s: float = CALM_S
    tail: float = TAIL

    @property
    def measured_s(self) -> float:
        return self.tail * self.lasts_s

    def spec(self, name: str, *, off: bool) -> JobSpec:
        scenario = self.scenario
        spec = job(
            name,
            steps=3000,
            microbatches=MICROBATCHES,
            layers=scenario.blocks,
            width=32,
            heads=2,
            context=16,
            pad_ms=self.pad_ms,
            training={"optimizer": {"lr": 1e-3}, "seed": 5},
            parallel={"stages": scenario.stages, "replicas": scenario.replicas},
        )
        if off and "automation" in JobSpec.model_fields:
            spec["automation"] = {"mode": "off"}
        return JobSpec.model_validate(spec)

    @property
    def padded(self) -> PaddedJob:
        return PaddedJob(self.scenario.stages, self.scenario.blocks, self.pad_ms, MICROBATCHES)


@dataclass
class Steps:
    """When each step of a job ended, by the orchestrator's clock."""

    ended_at: list[float] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def until(self, at: float) -> float:
        """Steps until a moment, with the part of the one that is under way."""
        number = bisect_right(self.ended_at, at)
        if not 0 < number < len(self.ended_at):
            return float(number)
        last, following = self.ended_at[number - 1], self.ended_at[number]
        return number + (at - last) / (following - last)

    def rate(self, since: float, until: float) -> float:
        return (self.until(until) - self.until(since)) / (until - since)

    def settled(self, since: float, until: float, optimum: float) -> int | None:
        """How many steps it took until four in a row were done at 0.9 of the optimum, in steps per second."""
        within = [at for at in self.ended_at if since <= at <= until]
        pairs = enumerate(zip(within, within[IN_A_ROW:], strict=False), 1)
        return next((count for count, (a, b) in pairs if IN_A_ROW / (b - a) >= NEAR * optimum), None)


async def run_once(
    bench: MindBench, mode: str, number: int, names: Sequence[str], seed: int, *, automated: bool = False
) -> MindRun:
    """Run one job under the script of a seed, with or without modules.

    `automated`: the orchestrator may act also without any.

    Raises:
        NothingMeasured: The job did no step before the script, or under it.
    """
    mesh, scenario = bench.mesh, bench.scenario
    scripts = scenario.scripts(seed, bench.lasts_s)
    slots = {cluster: EmulatedSlots(bench.scripts, cluster, node_name()) for cluster in scenario.slots}
    async with AsyncExitStack() as stack:
        for each in slots.values():
            each.rest()
        _play(slots, scripts, time.time() + 3600.0, only_before=True)
        if names:
            await stack.enter_async_context(running_modules(mesh, names))
        name = (
            await mesh.client.submit(bench.spec(f"mind-{mode.split()[0]}", off=not names and not automated))
        ).job
        followed = {name: Steps()}
        stack.push_async_callback(_cancelled, mesh, followed)
        stack.enter_context(_beside(_follow(mesh, name, followed[name])))
        await asyncio.wait_for(followed[name].began.wait(), READY_S)
        await asyncio.sleep(bench.calm_s)
        record = await mesh.client.job(name)
        assert record.graph is not None
        begins = time.time()
        _play(slots, scripts, begins)
        in_use = tuple((cluster, slot) for cluster, count in scenario.slots.items() for slot in range(count))
        count = sum(not unit.is_data for unit in record.graph.units)
        spans = [Span(from_s=0.0, slots=in_use, instances=count)]
        for part, deed in scenario.deeds:
            await asyncio.sleep(max(0.0, begins + part * bench.lasts_s - time.time()))
            span, second = await _do(bench, stack, deed, spans[-1], begins)
            spans.append(span)
            if second is not None:
                followed[second] = Steps()
                stack.enter_context(_beside(_follow(mesh, second, followed[second])))
        ends = begins + bench.measured_s
        await asyncio.sleep(max(0.0, ends - time.time()))
        first = followed[name].ended_at
        calm = [at for at in first if begins - bench.calm_s / 2 <= at <= begins]
        some(calm, f"steps of {name} in its calm", remedy="a shorter --pad-ms makes more", least=2)
        before = (len(calm) - 1) / (calm[-1] - calm[0])
        under = sum(each.rate(begins, ends) for each in followed.values())
        if not under > 0:
            raise NothingMeasured(f"no step of {name} while its script ran")
        possible = possible_steps(bench.padded, record.graph, scripts, spans, bench.measured_s)
        optimum = before * gain_at(bench.padded, record.graph, scripts, spans[0], 0.0)
        settled = followed[name].settled(begins, begins + bench.lasts_s, optimum)
        changes = await _changes(mesh, name)
        adopted, declined = await _decisions(mesh, name)
    found = MindRun(
        mode=mode,
        number=number,
        before=before,
        under=under,
        possible=before * possible.best / bench.measured_s,
        by_routes=before * possible.by_routes / bench.measured_s,
        changes=changes,
        adopted=adopted,
        declined=declined,
        settled=settled,
    )
    say(
        f"round {number + 1}: {mode:9} {before:.3f} → {under:.3f} steps/s, possible {found.possible:.3f}"
        + "".join(f"; {text}" for text in (*adopted[:3], *(one.what for one in changes)))
    )
    return found


@asynccontextmanager
async def running_modules(mesh: BenchMesh, names: Sequence[str]) -> AsyncIterator[None]:
    """Built-in modules as processes of their own, ready; gone afterwards."""
    log = mesh.folder / "modules.log"
    log.write_text("")
    state = str(mesh.running.folder.path)
    with modules(mesh.folder, *((name, "--state", state) for name in names), log=log):
        deadline = time.monotonic() + READY_S
        while log.read_text().count(READY) < len(names):
            if time.monotonic() > deadline:
                raise SystemExit(f"modules not ready after {READY_S:.0f} s: {log.read_text()[-400:]}")
            await asyncio.sleep(0.2)
        yield


# --- parts ------------------------------------------------------------------------------------------------
def _play(
    slots: dict[str, EmulatedSlots], scripts: SlotScripts, begins: float, *, only_before: bool = False
) -> None:
    """Write the scripts; `only_before`: what holds from before the job on."""
    for cluster, each in slots.items():
        mine = {
            slot: [phase.model_copy(update={"at_s": max(phase.at_s, -begins)}) for phase in phases]
            for (where, slot), phases in scripts.items()
            if where == cluster
        }
        if only_before:
            mine = {slot: [one for one in phases if one.at_s < 0] for slot, phases in mine.items()}
        each.play({slot: phases for slot, phases in mine.items() if phases}, begins)


async def _do(
    bench: MindBench, stack: AsyncExitStack, deed: Deed, span: Span, begins: float
) -> tuple[Span, str | None]:
    """Do something to the mesh; what the job may use from then on, and the second job."""
    mesh = bench.mesh
    if deed == "drain":
        cluster = sorted(bench.scenario.slots)[-1]
        (node,) = [one for one in await mesh.client.nodes() if one.status.cluster == cluster]
        await mesh.client.drain(node.status.sid, reason="a notice of the spot market")
        stack.push_async_callback(mesh.client.uncordon, node.status.sid)
        left = tuple(slot for slot in span.slots if slot[0] != cluster)
        return Span(from_s=time.time() - begins, slots=left, instances=min(span.instances, len(left))), None
    if deed == "join":
        more: tuple[Slot, ...] = tuple(("joined", slot) for slot in range(JOINED_SLOTS))
        await stack.enter_async_context(
            child(
                *("dmsc", "join", "--state", str(mesh.running.folder.path), "--cluster", "a"),
                *("--node", "joined", *["--emulate-slot", "1"] * JOINED_SLOTS),
                *("--allow-url", "*", "--log-level", "error"),
            )
        )
        while True:
            nodes = await mesh.client.nodes()
            if any(one.status.node == "joined" and one.status.slots for one in nodes):
                break
            await asyncio.sleep(0.5)
        slots = (*span.slots, *more)
        there = Span(from_s=time.time() - begins, slots=slots, instances=span.instances + JOINED_SLOTS)
        return there, None
    name = (await mesh.client.submit(bench.spec("mind-second", off=True))).job
    return Span(from_s=time.time() - begins, slots=span.slots, instances=len(span.slots)), name


async def _follow(mesh: BenchMesh, name: str, steps: Steps) -> None:
    async for event in mesh.client.events(name):
        if event.result is not None:
            steps.ended_at.append(event.at)
            steps.began.set()


async def _cancelled(mesh: BenchMesh, followed: dict[str, Steps]) -> None:
    """End the jobs, and wait until they have ended."""
    for name in followed:
        with suppress(DmscError):  # it may have ended
            await mesh.client.cancel(name)
    for name in followed:
        await mesh.client.wait(name)


@contextmanager
def _beside(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Something that goes on until the block ends."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()


async def _changes(mesh: BenchMesh, name: str) -> tuple[ChangeFigure, ...]:
    """What was forecast and made, from the job's record."""
    record = await mesh.client.job(name)
    return tuple(
        ChangeFigure(
            what=f"{one.what}: {one.state.value}",
            by=one.by,
            forecast_s=one.forecast.step_after_s,
            before_s=one.before_s or one.forecast.step_before_s,
            after_s=one.after_s,
            state=one.state.value,
        )
        for one in record.changes
        if one.forecast is not None
    )


async def _decisions(mesh: BenchMesh, name: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """What was adopted, and how often what was declined for which reason (figures left out)."""
    adopted: list[str] = []
    declined: dict[str, int] = {}
    async for item in mesh.bus.history(POLICY_DECISION):
        decision = item.message
        assert isinstance(decision, PolicyDecision)
        if decision.job != name:
            continue
        if decision.adopted:
            adopted.append(f"{decision.module}: {decision.reason}")
        else:
            reason = re.sub(r"\S*\d\S*", "…", decision.reason)[:80]
            key = f"{decision.module}: {reason}"
            declined[key] = declined.get(key, 0) + 1
    return tuple(adopted), declined
