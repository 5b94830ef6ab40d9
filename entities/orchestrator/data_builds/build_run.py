"""One build under one leader: phase after phase, until its version is there, it has failed or is cancelled.

A build's work is in its rows (`unit_rows`) and objects. So a new leader, or a new build of the same work, has
nothing to take over: it computes the same orders, finds the rows that are there, and goes on with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bus.logs import get_logger
from bus.tasks import cancel
from entities.orchestrator.data_builds.build_store import BuildStore
from entities.orchestrator.data_builds.lane_holding import LaneHolding, may_resume
from entities.orchestrator.data_builds.leftovers import BuildObjects
from entities.orchestrator.data_builds.phases import orders_of, phases_of
from entities.orchestrator.data_builds.progress import UnitTimes, pace, progress_of
from entities.orchestrator.data_builds.unit_dispatch import UnitDispatch
from entities.orchestrator.data_builds.unit_ledger import (
    LOST_CODES,
    CommitUnit,
    Effect,
    StopBuild,
    Unit,
    UnitLedger,
    choose_agent,
)
from entities.orchestrator.data_builds.unit_rows import Row, UnitRows, by_unit
from entities.orchestrator.data_builds.versions import DataSetVersions
from entities.orchestrator.job.teardown import forget_at_nodes
from entities.orchestrator.job.term import TermContext
from entities.orchestrator.job_state.job_secrets import forget_secrets, secrets_of
from entities.orchestrator.queue.job_queue import JobQueue
from schemas.data_set.assembly import assembled
from schemas.data_set.builds import HAS_LANES, BuildRecord, BuildState, UnitCommit
from schemas.data_set.commands import UnitPrepared
from schemas.data_set.manifest import DataSetContent
from schemas.data_set.secrets import build_references
from schemas.data_set.units import UnitPhase, UnitResult
from schemas.errors import BadInput, Conflict, DmscError, Fenced, Unavailable
from schemas.usage import JobUsage

log = get_logger("orchestrator")

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class BuildTimes:
    """Periods, in seconds."""

    look_s: float = 1.0
    """How often figures are told, and nodes are looked at that have become free."""
    waiting_s: float = 5.0
    """How long no node may have had a unit before the build says that it waits for one."""
    retry_s: float = 0.5
    """Pause before work is repeated for which the bus was away."""
    pause_s: float = 0.1
    """Pause before a unit is bound again that was lost; it doubles with each loss."""
    pause_most_s: float = 5.0
    """Longest such pause."""
    forget_s: float = 5.0
    """Deadline for a node agent to end what is left of a build."""


class BuildFailed(Exception):
    """Ends the build; `reason` is one line for the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BuildRun:
    """One build. `working`: units of all builds, by agent; `queue`: who gives it lanes."""

    def __init__(
        self,
        term: TermContext,
        store: BuildStore,
        versions: DataSetVersions,
        objects: BuildObjects,
        working: Counter[str],
        queue: JobQueue,
        times: BuildTimes = BuildTimes(),
    ) -> None:
        self.store = store
        self.lanes = LaneHolding(self, queue.again)
        self._queue = queue
        self._term = term
        self._versions = versions
        self._objects = objects
        self._times = times
        record = store.record
        self._rows = UnitRows(term.bus, record.scope, record.build)
        self._dispatch = UnitDispatch(term.bus, term.mesh, record.build, record.spec, record.user, working)
        self._decision = asyncio.Lock()
        self._end = asyncio.Event()
        self._wake = asyncio.Event()
        self.lanes.wake = self._wake.set
        self._broken: BaseException | None = None
        self._idle_since: float | None = None
        self._secrets = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def record(self) -> BuildRecord:
        return self.store.record

    # --- its life -------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Drives the build to its end; returns early if another leader has it."""
        self._task = asyncio.current_task()
        try:
            if self.record.ends_as is None:
                await self._until_decided()
            await self._clean_up()
            ends_as = self.record.ends_as
            assert ends_as is not None
            await self.store.move(ends_as, self.record.reason)
        except Fenced as error:
            log.info("build left to the next leader", build=self.record.build, reason=error.text)

    async def shut_down(self) -> None:
        """Ends this run; the build goes on with the next leader."""
        await cancel(self._task)

    async def cancel(self, reason: str) -> None:
        """
        Raises:
            Conflict: it is ending.
        """
        if not await self._decide(BuildState.CANCELLED, reason):
            raise Conflict(f"build {self.record.build} is ending: {self.record.ends_as}")

    async def park(self, why: str) -> None:
        """Begins no more units until a person resumes it; those that have begun end.

        Raises:
            Conflict: it is ending.
        """
        self._refuse_ending()
        if not self.record.held:
            await self.store.note(held=why)
            self.lanes.park(why)
            self._queue.again()
            self._wake.set()

    async def resume(self, why: str) -> None:
        """Goes on as soon as there are lanes.

        Raises:
            Conflict: it is ending, or neither parked nor held.
        """
        self._refuse_ending()
        record = self.record
        if not may_resume(record, self.lanes.parks):
            raise Conflict(
                f"build {record.build} is {record.state}: only a parked or held one can be resumed"
            )
        if record.held:
            used = record.usage.held(record.usage.slots, time.time()).held_s
            await self.store.note(held="", resumed_held_s=used)
            await self.store.say(why)
        self._queue.goes_on(record.build)
        self.lanes.go_on()
        self._wake.set()

    async def prioritise(self, priority: int) -> None:
        """Gives it another class in the queue.

        Raises:
            Conflict: it is ending.
        """
        self._refuse_ending()
        spec = self.record.spec
        asked = spec.queue.model_copy(update={"priority": priority})
        await self.store.note(spec=spec.model_copy(update={"queue": asked}))
        self._queue.again()

    def _refuse_ending(self) -> None:
        record = self.record
        if record.ends_as is not None:
            raise Conflict(f"build {record.build} is ending: {record.ends_as}")

    def used(self, usage: JobUsage) -> None:
        """Takes what it has used into its record."""
        self.store.used(usage)

    def hold(self, why: str) -> None:
        """It waits for a person: so says the queue, at the end of its wall time."""
        self._term.spawn(self.park(why))

    def notify(self, text: str) -> None:
        """Tells its followers what becomes of its lanes."""
        self._term.spawn(self.store.say(text))

    def prepared(self, message: UnitPrepared, agent: str) -> bool:
        return self._dispatch.prepared(message, agent)

    async def _until_decided(self) -> None:
        work = asyncio.create_task(self._build(), name=f"build {self.record.build}")
        end = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not self._end.is_set():
                try:
                    work.result()
                except BuildFailed as error:
                    await self._decide(BuildState.FAILED, error.reason)
                except BadInput as error:
                    await self._decide(BuildState.FAILED, error.text)
                except DmscError:
                    raise
                except Exception as error:
                    log.error("build failed", build=self.record.build, exc_info=error)
                    reason = f"an error of the orchestrator itself ({type(error).__name__}); see its log"
                    await self._decide(BuildState.FAILED, reason)
        finally:
            await cancel(work, end)

    async def _decide(self, ends_as: BuildState, reason: str, **figures: object) -> bool:
        """Records how the build ends; False if that is certain already."""
        async with self._decision:
            if self.record.ends_as is not None:
                return False
            await self.store.move(BuildState.ENDING, reason, ends_as=ends_as, left_s=None, **figures)
        self._end.set()
        return True

    # --- its work -------------------------------------------------------------------------------------------
    async def _build(self) -> None:
        spec = self.record.spec
        await self._until_lanes()
        self._secrets = await self._insistently(lambda: secrets_of(self._term.bus, build_references(spec)))
        rows = await self._usable(await self._rows.load())
        results: dict[UnitPhase, list[UnitResult]] = {}
        skipped: list[int] = []
        for phase in phases_of(spec):
            orders = await asyncio.to_thread(orders_of, phase, spec, results)
            skips = spec.on_bad_unit == "skip"
            functions = ", ".join(spec.user_code())
            committed = by_unit(rows, phase)
            ledger = UnitLedger(phase, orders, committed, skips=skips, functions=functions)
            earlier = {place for place, row in rows.items() if row.build != self.record.build}
            ledger.reused = len(by_unit({place: rows[place] for place in earlier}, phase).keys() & orders)
            await self._work(ledger)
            results[phase] = ledger.results()
            skipped += ledger.skipped()
        if self.record.built_at is None:
            await self.store.note(built_at=time.time())
        (plan,) = results.pop("plan")
        others = [result for phase_results in results.values() for result in phase_results]
        await self._publish(await asyncio.to_thread(assembled, spec, plan, others, skipped))

    async def _publish(self, content: DataSetContent) -> None:
        """Makes the version, and decides that the build is done; a cancellation comes before, or is late."""
        async with self._decision:
            if self.record.ends_as is not None:
                return
            built_at = self.record.built_at or time.time()
            await self._term.candidate.confirmed()
            version, unchanged = await self._insistently(
                lambda: self._versions.commit(self.record, content, built_at)
            )
            reason = f"{version.reference}, {version.digest[:12]}"
            if unchanged:
                where = "" if version.store == self.record.spec.folder else f" and lies in {version.store}"
                reason += f": equal to what was built{where}, no new version is made"
            await self.store.move(
                BuildState.ENDING,
                reason,
                ends_as=BuildState.DONE,
                left_s=None,
                version=version.version,
                digest=version.digest,
                unchanged=unchanged,
            )
        self._end.set()

    async def _usable(self, rows: dict[Row, UnitCommit]) -> dict[Row, UnitCommit]:
        """The rows whose objects are there; rows of an earlier build whose objects are gone are removed."""
        earlier = {place for place, row in rows.items() if row.build != self.record.build}
        if not earlier:
            return rows
        try:
            names = await self._objects.names(self.record.spec.folder, self._secrets)
        except DmscError as error:
            log.warning("finished units not looked at", build=self.record.build, reason=error.text)
            names = set()
        gone = [
            place
            for place in earlier
            if any(stored.name not in names for stored in rows[place].result.outputs.values())
        ]
        await self._rows.remove(gone)
        return {place: row for place, row in rows.items() if place not in gone}

    async def _work(self, ledger: UnitLedger) -> None:
        """Has all units of a phase done and committed.

        Raises:
            BuildFailed: one can't be done.
        """
        times = UnitTimes()
        begun_s, begun_rows = time.monotonic(), progress_of(ledger, times).rows_in

        async def tell(*, began: bool = False) -> None:
            progress = progress_of(ledger, times)
            rows_per_s, left_s = pace(progress, begun_rows, time.monotonic() - begun_s)
            await self.store.progress(progress, rows_per_s, left_s, began=began)

        await tell(began=True)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while not ledger.complete:
                if self._broken is not None:
                    raise self._broken
                self._wake.clear()
                self.lanes.settle(ledger.left)
                self._bind(ledger, times, tasks)
                await self._tell_waiting(idle=not tasks)
                await self._woken()
                await tell()
        finally:
            await cancel(*tasks)
        await tell(began=True)

    def _bind(self, ledger: UnitLedger, times: UnitTimes, tasks: set[asyncio.Task[None]]) -> None:
        """Gives units to the nodes of its lanes; one that has failed, to any with room, in place of one."""
        for unit in ledger.planned():
            if not self.lanes.idle:
                return
            everywhere = self._dispatch.loads(times)
            loads = everywhere if unit.avoided else self.lanes.loads(everywhere)
            agent = choose_agent(unit, loads, times.usual_s)
            if agent is None:
                if unit.avoided:
                    continue
                return
            ledger.bind(unit.key, agent)
            self._dispatch.take(agent)
            lane = self.lanes.begin(agent, unit.key)
            task = asyncio.create_task(self._do(ledger, unit, times))
            tasks.add(task)
            task.add_done_callback(partial(self._ended, tasks, agent, lane))

    # --- its turn -------------------------------------------------------------------------------------------
    async def _until_lanes(self) -> None:
        """Waits for its first lanes; it reads nothing before.

        Raises:
            BuildFailed: what it was to start after has failed.
        """
        while not self.lanes.holds:
            self._wake.clear()
            await self._tell_waiting(idle=True)
            await self._woken()
        await self._tell_waiting(idle=False)

    async def _tell_waiting(self, *, idle: bool) -> None:
        """Records that it waits for lanes, and why, and that it goes on.

        Lanes go and come with slots and nodes: a moment without one is no event, if it has begun.

        Raises:
            BuildFailed: what it was to start after has failed.
        """
        record = self.record
        if not idle or self.lanes.holds:
            self._idle_since = None
            if record.ends_as is None and self.lanes.holds and record.state is not BuildState.BUILDING:
                await self.store.move(BuildState.BUILDING, "goes on" if record.phases else HAS_LANES)
            return
        if self.lanes.in_vain:
            raise BuildFailed(self.lanes.reason)
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        settled = time.monotonic() - self._idle_since >= self._times.waiting_s
        reason = record.held or self.lanes.reason
        parked = self.lanes.parked or bool(record.held) or record.state is BuildState.PARKED
        working = record.state is BuildState.BUILDING
        if record.ends_as is not None or not reason or (working and not settled and not parked):
            return
        state = BuildState.PARKED if parked and record.phases else BuildState.QUEUED
        if (record.state, record.reason) != (state, reason):
            await self.store.move(state, reason)

    async def _woken(self) -> None:
        """Returns once there may be something to do, or it is time to look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._times.look_s):
                await self._wake.wait()

    def _ended(self, tasks: set[asyncio.Task[None]], agent: str, lane: str, task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        self._dispatch.free(agent)
        self.lanes.end(lane)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error
        self._wake.set()

    async def _do(self, ledger: UnitLedger, unit: Unit, times: UnitTimes) -> None:
        """Has a unit done by the agent to which it is bound, and commits it."""
        agent, effect = unit.agent, None
        try:
            answer = await self._dispatch.give(unit, self._secrets)
            if answer.result is not None:
                times.take(agent, answer.seconds)
                effect = ledger.done(unit.key, agent, answer.result)
            else:
                effect = await self._failure(ledger, unit, agent, answer.code, answer.text)
        except DmscError as error:
            effect = await self._failure(ledger, unit, agent, error.code, error.text)
        await self._carry_out(ledger, effect)

    async def _failure(self, ledger: UnitLedger, unit: Unit, agent: str, code: str, text: str) -> Effect:
        line = f"unit {unit.order.index} of {ledger.phase} on {agent}: {text}"
        log.warning("unit failed", build=self.record.build, unit=unit.key, agent=agent, code=code, text=text)
        await self.store.failure(ledger.phase, line)
        if code in LOST_CODES:
            await asyncio.sleep(min(self._times.pause_most_s, self._times.pause_s * 2.0**unit.losses))
        return ledger.failed(unit.key, agent, code, text)

    async def _carry_out(self, ledger: UnitLedger, effect: Effect) -> None:
        if isinstance(effect, CommitUnit):
            row = await self._rows.commit(effect.unit, effect.result, effect.skipped)
            effect = ledger.commit(effect.unit, row.result, row.skipped)
        if isinstance(effect, StopBuild):
            raise BuildFailed(effect.reason)

    async def _insistently(self, call: Callable[[], Awaitable[Value]]) -> Value:
        while True:
            try:
                return await call()
            except Unavailable as error:
                log.warning("build waits for the bus", build=self.record.build, reason=error.text)
                await asyncio.sleep(self._times.retry_s)

    # --- its end --------------------------------------------------------------------------------------------
    async def _clean_up(self) -> None:
        """Ends processes of its units; of a build that is done, removes what its version does not need."""
        self.lanes.clear()
        await forget_at_nodes(self._term.bus, self._term.mesh, self.record.build, self._times.forget_s)
        with contextlib.suppress(DmscError):
            await forget_secrets(self._term.bus, build_references(self.record.spec).values())
        if self.record.ends_as is BuildState.DONE:
            await self.drop_work()

    async def drop_work(self) -> None:
        """Removes the rows of its work, and the objects to which no version refers."""
        spec = self.record.spec
        with contextlib.suppress(DmscError):
            self._secrets = self._secrets or await secrets_of(self._term.bus, build_references(spec))
        rows = await self._rows.load()
        await self._rows.remove(list(rows))
        try:
            kept = await self._versions.objects_in(spec.name, spec.folder)
        except DmscError as error:
            log.warning("objects of a build not removed", build=self.record.build, reason=error.text)
            return
        await self._objects.remove_but(spec.folder, kept, self._secrets)
        await self.store.note(keeps_work=False)
