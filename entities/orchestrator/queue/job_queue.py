"""The one owner of the queue during a term: it has all jobs decided about at once (ADR-0073).

A job that waits takes a `QueueTurn`, and is told of its slots or of its reason; builds of data sets are in
the same queue, and are told of their lanes (`queued_builds.py`). `decide` runs on a thread; if anything has
changed meanwhile, its decision is dropped and another one made, a few times. All that it needs
is in the jobs' records, in the registrations of nodes, and in the bucket `reservations`, so that a new leader
decides alike; a notice begins anew under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import ChainMap, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from bus.logs import get_logger
from entities import metrics
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue.admission import count_use, with_shares
from entities.orchestrator.queue.capacity_signal import capacity_of, demand_of
from entities.orchestrator.queue.job_trials import AsksTrial, trials_on
from entities.orchestrator.queue.mesh_slots import (
    RegisteredSlots,
    SlotFacts,
    busy_slots,
    nodes_of,
    queue_place,
    slot_facts,
)
from entities.orchestrator.queue.park_orders import ParkOrders
from entities.orchestrator.queue.promised_slots import PromisedSlots
from entities.orchestrator.queue.queued_builds import QueuedBuilds
from entities.orchestrator.queue.slot_holder import QueueMember, SeenHolders, SlotHolder
from entities.queue.decision import Cause, Hold, QueueDecision
from entities.queue.explanation import explain
from entities.queue.queue_rules import QueueRules
from entities.queue.queued_job import JobRequest, QueuedJob, predicted_s
from entities.queue.reservations import SlotReservation, assign, barred_for
from entities.queue.scheduling import QueueSurroundings, decide
from entities.queue.slot_pools import MeshSlot, SlotTable
from entities.queue.tenant_shares import DecayedUse
from schemas import names
from schemas.data_set.builds import BuildRecord, is_build
from schemas.errors import Conflict, DmscError, NotFound
from schemas.job import JobRecord, JobState
from schemas.machines.demand import MachineDemand
from schemas.queue import MOST_LISTED, QueueCapacity, QueueExplained, QueueStatus, SlotsReserved
from schemas.task_graph import Placement, TaskGraph

log = get_logger("orchestrator")

TOLD_AT_ONCE = 100
"""Waiting jobs that hear their reason before the orchestrator's loop goes on with something else."""
DECISION_TRIES = 3
"""A decision that came too late is dropped, but not the last of so many: the mesh may never come to rest.

Each of its orders is checked when it is carried out.
"""
ASKED_AT_ONCE = 100
"""Jobs whose state is read before the orchestrator's loop goes on with something else."""
WRITTEN_AT_ONCE = 8
"""Waiting jobs that write their reason at the same time: a decision may have a new one for thousands."""
KEPT = "kept"
"""Stands for an instance in a slot that is kept for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotGrant:
    """What a job is placed with. `nodes`: those that it may use; None: any. `slots`: of the plan tried."""

    replicas: int
    nodes: frozenset[str] | None = None
    slots: frozenset[str] | None = None


PlacesJob = Callable[[SlotGrant], Awaitable[TaskGraph | NoRoom]]


class QueueTurn:
    """A waiting job's place in the queue. `plan`: places it now, and so takes its slots, or says why not.

    `trial`: tries its plan during a decision, on a mesh; None: a count of slots says enough.
    """

    def __init__(self, plan: PlacesJob) -> None:
        self.plan = plan
        self.trial: AsksTrial | None = None
        self._news: asyncio.Queue[TaskGraph | NoRoom | DmscError] = asyncio.Queue()
        self._said: NoRoom | None = None

    async def news(self) -> TaskGraph | NoRoom:
        """Its placement, or why it goes on waiting, each time that the reason is another one.

        Raises:
            DmscError: the job can't be planned at all.
        """
        news = await self._news.get()
        if isinstance(news, DmscError):
            raise news
        return news

    async def take(self, grant: SlotGrant) -> bool:
        """Has the job take its slots; returns whether it did."""
        try:
            news = await self.plan(grant)
        except DmscError as error:
            self._news.put_nowait(error)
            return False
        except Exception as error:  # the queue of all goes on
            log.exception("a job could not be placed")
            news = NoRoom(f"its plan failed: {type(error).__name__}: {error}")
        self.tell(news)
        return not isinstance(news, NoRoom)

    def tell(self, news: TaskGraph | NoRoom) -> None:
        """Tells the job where it is placed, or why it waits."""
        if news != self._said:
            self._said = news if isinstance(news, NoRoom) else None
            self._news.put_nowait(news)


def unknown(name: str) -> str:
    """What is said of an id that nobody knows."""
    if is_build(name):
        return f"no build {name}: `dmsc data list` shows them"
    if names.is_array(name):
        return f"no array {name}: `dmsc jobs` lists them"
    return f"no job {name}: `dmsc jobs` lists their ids"


class JobQueue:
    """Decides which jobs of one term start, with how many replicas, and which shrink, grow or park.

    `holders`: the jobs that have not ended, by id; `ended`: records of others. `builds` are beside them.
    """

    def __init__(
        self,
        mesh: MeshView,
        holders: Mapping[str, SlotHolder],
        ended: Mapping[str, JobRecord],
        rules: QueueRules,
    ) -> None:
        self._mesh = mesh
        self._holders = holders
        self.rules = rules
        self._ended = ended
        self._used = DecayedUse(rules.half_life_s)  # by jobs that have ended
        self._turns: dict[str, QueueTurn] = {}
        self.builds = QueuedBuilds(mesh, self.again)
        """Those that wait or work, beside the jobs."""
        self.taking_over = False
        """Not all that earlier leaders left is known yet: who comes after one of them goes on waiting."""
        members: list[MutableMapping[str, Any]] = [cast(Any, holders), self.builds.members]
        self._members: Mapping[str, QueueMember] = ChainMap(*members)
        self._promised = PromisedSlots(holders)
        self._orders = ParkOrders(self._members, self._claimants)
        self._slots = RegisteredSlots()
        self.reservations: Callable[[float], tuple[SlotReservation, ...]] = lambda now: ()
        """Slots that are kept for a time, as the core sees them."""
        self.array_done: Callable[[str], bool | None] = lambda array: None
        """Whether all members of an array are done; None: not certain yet."""
        self.used_up: Callable[[JobRecord], str] = lambda record: ""
        """Why a job's budget does not let it run; empty: it does."""
        self._suggested: dict[str, int] = {}
        self._entered = asyncio.Event()
        self._holds: Mapping[str, Hold] = {}  # why jobs wait, by the last decision
        self._last_wanted: QueueCapacity | None = None  # when somebody last asked
        self.writing = asyncio.Semaphore(WRITTEN_AT_ONCE)
        """Held by a waiting job while it writes why it waits."""
        self.looked = asyncio.Event()
        """Set whenever mesh and queue have been looked at."""

    @contextlib.contextmanager
    def turn(self, job: str, plan: PlacesJob) -> Iterator[QueueTurn]:
        """A job enters the queue, until it leaves the context."""
        self._turns[job] = turn = QueueTurn(plan)
        self._entered.set()
        try:
            yield turn
        finally:
            if self._turns.get(job) is turn:
                del self._turns[job]

    def job_ended(self, record: JobRecord | BuildRecord) -> None:
        """What the job or build has used goes on counting for its user, once for each of them."""
        count_use(self._used, record, record.changed_at)

    def again(self) -> None:
        """Decides again, though neither mesh nor queue has changed: something about a job has."""
        self._entered.set()

    @property
    def table(self) -> SlotTable:
        """The slots of the mesh."""
        return self._slots.table(self._mesh.nodes.values(), self._mesh.cordons.places())

    def occupied(self, job: str) -> dict[str, tuple[Placement, ...]]:
        """Slots promised to all jobs but this one, or kept for others, by node agent."""
        promised = self._promised.to_others(job)
        taken = {
            node.sid: places
            for node in self._mesh.nodes.values()
            if (places := promised.get((node.cluster, node.node)))
        }
        kept: dict[str, list[Placement]] = defaultdict(list)
        for slot in self._kept_from(job):
            if (node := self._mesh.nodes.get(slot.node)) is not None:
                index = int(slot.slot.rpartition("/")[2])
                place = Placement(sid=KEPT, cluster=node.cluster, node=node.node, slot=index, device="")
                kept[slot.node].append(place)
        for agent, more in kept.items():
            taken[agent] = (*taken.get(agent, ()), *more)
        return taken

    def _kept_from(self, job: str) -> Iterator[MeshSlot]:
        """The slots that are kept for others while the job is predicted to run."""
        now = time.time()
        kept = self.reservations(now)
        if not kept:
            return
        if (run := self._holders.get(job)) is None:  # a job that somebody thinks of: nothing is kept for it
            request, until = JobRequest(job=job, submitted_at=now), math.inf
        elif (waiting := run.waiting) is not None:
            request, until = waiting.request, now + predicted_s(waiting, waiting.request.replicas.want)
        else:
            request, until = run.active.request, run.active.ends_at(now)
        table = self.table
        for number in barred_for(request, assign(kept, table), now, until):
            yield table.slots[number]

    async def run(self) -> None:
        """Decides whenever something has changed and a job waits, until cancelled."""
        while True:
            self._entered.clear()
            seen = self._mesh.changes
            again_at = await self._decided() if self._has_to_decide() else None
            self.looked.set()
            await self._until_changed(seen, again_at)

    def _has_to_decide(self) -> bool:
        if self._turns or self._orders or self.builds.members or self.reservations(time.time()):
            return True
        requests = (run.active.request for run in self._holders.values())
        return any(request.elastic or request.wall_time_s for request in requests)

    async def _until_changed(self, seen: int, again_at: float | None) -> None:
        """Returns once the mesh or the queue has changed, or it is time to decide again."""
        wait_s = None if again_at is None else max(0.0, again_at - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                entered = asyncio.create_task(self._entered.wait())
                changed = asyncio.create_task(self._mesh.until_changed(seen))
                try:
                    await asyncio.wait({entered, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    entered.cancel()
                    changed.cancel()

    async def _decided(self) -> float | None:
        """Makes one decision and has it carried out; returns when time alone will change it."""
        self._orders.follow(time.time())
        present = await self._facts()
        for _ in range(DECISION_TRIES):
            facts, now = present, time.time()
            around = await self._around(facts)
            decision = await asyncio.to_thread(decide, facts.queue, facts.running, around, now)
            present = await self._facts()
            if await asyncio.to_thread(facts.as_decided, present):
                break
        await self._carry_out(decision, {job.request.job for job in facts.queue if job.request.local})
        self._holds = decision.holds
        await self._tell(decision.holds)
        self._orders.follow(time.time())
        for at in self._orders.times(now):
            decision.again_at(at)
        return decision.next_at

    def _claimants(self, now: float) -> set[str]:
        """Jobs and reservations for which somebody may park."""
        claimants = {each.name for each in self.reservations(now) if each.end_at > now}
        for name, member in self._members.items():
            if (waiting := member.waiting) is not None and not waiting.request.held:
                claimants.add(name)
        return claimants

    def knows(self, name: str) -> bool:
        """Whether there is, or was lately, such a job or build."""
        return name in self._members or name in self._ended or name in self.builds.ended

    def no_growth(self, job: str) -> str:
        """Why a job gets no more slots now, whatever a suggestion says; empty if it may."""
        for run in self._holders.values():
            if run.name == job:
                continue
            if run.finds_room:
                return f"job {run.name} replaces an instance first"
            if (waiting := run.waiting) is not None and not waiting.request.held:
                return f"job {run.name} waits for slots"
        return ""

    def goes_on(self, job: str) -> None:
        """A person has resumed a job: it parks no more, if it was to."""
        self._orders.forget(job)
        self.again()

    async def _around(self, facts: SlotFacts) -> QueueSurroundings:
        """Slots, rules, and what has become of jobs that others wait for."""
        after = {other for job in facts.queue for other in job.request.after}
        fates = {
            name: self.array_done(name) if names.is_array(name) else self._done(name)
            for name in after
            if name not in self._members and not (self.taking_over and not self.knows(name))
        }
        done = {job: fate for job, fate in fates.items() if fate is not None}
        now, rules = time.time(), self.rules
        asked = {job: turn.trial for job, turn in self._turns.items() if turn.trial is not None}
        around = QueueSurroundings(
            table=facts.table,
            rules=rules,
            reservations=self.reservations(now),
            done=done,
            trials=trials_on(self._mesh, asked),
        )
        jobs = [run.record for run in self._holders.values()]
        builds = list(self.builds.records().values())
        return await asyncio.to_thread(with_shares, around, self._used.copy(), jobs, builds, now)

    def _done(self, name: str) -> bool:
        """Whether a job or build that has ended, ended well."""
        if (record := self._ended.get(name)) is not None:
            return record.state is JobState.DONE
        return bool(self.builds.done(name))

    async def status(
        self, records: Mapping[str, JobRecord], job: str | None, reservations: Sequence[SlotsReserved] = ()
    ) -> QueueStatus:
        """Who waits and why; of one job, when it is expected to start, and what would change that.

        `job` may be an array: then all its waiting members are listed, and the first one is explained.

        Raises:
            Conflict: the job, or each member of the array, does not wait for slots.
        """
        facts, now = await self._facts(), time.time()
        waiting = {each.request.job: each for each in facts.queue}
        known: dict[str, JobRecord | BuildRecord] = {**records, **self.builds.records()}
        asked = {name for name, each in waiting.items() if job in (name, each.request.array)}
        if job is not None and not asked and names.is_array(job):
            raise Conflict(f"no job of array {job} waits for slots: dmsc jobs {job} lists them")
        if job is not None and not asked:
            record = known.get(job) or self.builds.ended.get(job) or self._ended.get(job)
            if record is None:
                raise NotFound(unknown(job))
            what = (f"job {job}", "slots") if isinstance(record, JobRecord) else (f"build {job}", "lanes")
            raise Conflict(f"{what[0]} does not wait for {what[1]}: {record.state}: {record.reason}")
        around = await self._around(facts)
        decision = await asyncio.to_thread(decide, facts.queue, facts.running, around, now)
        explained = None
        if job is not None:
            first = next(name for name in decision.order if name in asked)
            told = await asyncio.to_thread(explain, first, facts.queue, facts.running, around, now)
            explained = QueueExplained(
                starts_at=told.starts_at, later_than=told.later_than, remedies=told.remedies
            )
        shown = (
            (position, name)
            for position, name in enumerate(decision.order, start=1)
            if name in known and (job is None or name in asked)
        )
        places = [
            queue_place(position, waiting[name], known[name], decision.holds.get(name))
            for position, name in islice(shown, MOST_LISTED)
        ]
        wanted = await self._wanted(facts, decision.holds)
        return QueueStatus(
            order=self.rules.order,
            slots=wanted.slots,
            free=wanted.free,
            waiting=len(facts.queue),
            lacking=wanted.lacking,
            jobs=tuple(places),
            explained=explained,
            demands=wanted.demands,
            reservations=tuple(reservations),
            notices=self._orders.notices(),
        )

    def readings(self) -> Iterator[metrics.MetricReading]:
        """Who waits, and the capacity that the queue wants, as old as what was last told of it."""
        if (wanted := self._last_wanted) is None:
            return
        yield metrics.QUEUE_JOBS(wanted.waiting)
        yield metrics.QUEUE_BUILDS(self.builds.waiting)
        yield metrics.QUEUE_FREE(wanted.free)
        yield metrics.QUEUE_LACKING(wanted.lacking)

    def settled(self) -> bool:
        """Whether what an earlier leader knew is known again: all nodes, and of each job whether it waits."""
        known = (run.holds or run.held or run.waiting is not None for run in self._holders.values())
        return not self.taking_over and self._mesh.all_agents_heard() and all(known)

    async def capacity(self) -> tuple[QueueCapacity, MachineDemand]:
        """The capacity that the queue wants now, and the same by job."""
        facts, holds, now = await self._facts(), self._holds, time.time()
        by_job = await asyncio.to_thread(demand_of, facts, holds, self.reservations(now), now)
        return await self._wanted(facts, holds), by_job

    async def _wanted(self, facts: SlotFacts, holds: Mapping[str, Hold]) -> QueueCapacity:
        now = time.time()
        wanted = await asyncio.to_thread(capacity_of, facts, holds, self.reservations(now), now)
        self._last_wanted = wanted
        return wanted

    async def _facts(self) -> SlotFacts:
        """All that a decision depends on. What changes while others have the loop shows in the next facts."""
        seen = self._fresh_look()
        for number, run in enumerate(list(self._holders.values()), start=1):
            if not number % ASKED_AT_ONCE:
                await asyncio.sleep(0)
            seen.add(run)
        return await self._put_together(seen)

    def _fresh_look(self) -> SeenHolders:
        return SeenHolders({(node.cluster, node.node): node.sid for node in self._mesh.nodes.values()})

    async def _put_together(self, seen: SeenHolders) -> SlotFacts:
        self._orders.mark(seen.holding)
        nodes, table = list(self._mesh.nodes.values()), self.table
        waiting = [self._preferred(job) for job in seen.waiting] if self._suggested else seen.waiting
        facts = await asyncio.to_thread(slot_facts, table, busy_slots(nodes), waiting, seen.holding.values())
        return self.builds.look(facts, self._orders.mark)

    def _preferred(self, job: QueuedJob) -> QueuedJob:
        place = self._suggested.get(job.request.job)
        return job if place is None else replace(job, request=replace(job.request, preference=place))

    def suggest_order(self, jobs: Sequence[str]) -> None:
        """From now on these come first within their class, in this order; empty: as the rules say."""
        self._suggested = {job: place for place, job in enumerate(jobs)}
        self.again()

    @property
    def waiting(self) -> tuple[str, ...]:
        """The jobs that wait for slots."""
        return tuple(run.name for run in self._holders.values() if run.waiting is not None)

    async def _carry_out(self, decision: QueueDecision, local: Collection[str]) -> None:
        """Has jobs park and change their size, and places those that start.

        `local`: jobs that were given slots on certain nodes, because others run there, or do not.
        A job that is still being analysed keeps its slots free by being among those that start.
        """
        self._orders.give(decision.parks, time.time())
        for admission in decision.admissions:
            if self.builds.admit(admission):
                self._orders.forget(admission.job)
            await asyncio.sleep(0)  # with thousands of jobs each of them takes some milliseconds
            if (turn := self._turns.get(admission.job)) is None:  # it may have left meanwhile
                continue
            nodes = nodes_of(admission.slots) if admission.job in local else None
            self._orders.forget(admission.job)  # it has parked since orders were last followed
            if self._urgent:
                turn.tell(NoRoom("behind a running job that replaces an instance"))
                continue
            slots = None if turn.trial is None else frozenset(admission.slots)
            if await turn.take(SlotGrant(replicas=admission.replicas, nodes=nodes, slots=slots)):
                log.info("job admitted", job=admission.job, reason=admission.reason)
        for resize in decision.resizes:  # after those that start: it grows into what they leave
            if self.builds.resize(resize):
                continue
            run = self._holders.get(resize.job)
            if run is not None and not (resize.takes and self._urgent):
                run.resize(resize.replicas, resize.reason)

    @property
    def _urgent(self) -> bool:
        """Whether a running job is about to place an instance that it lost: others take no slot then."""
        return any(run.finds_room for run in self._holders.values())

    async def _tell(self, holds: Mapping[str, Hold]) -> None:
        """Tells the others why they wait; each then writes its record, so not all of thousands at once."""
        for number, (job, hold) in enumerate(holds.items(), start=1):
            if not number % TOLD_AT_ONCE:
                await asyncio.sleep(0)
            if self.builds.tell(job, hold) or (turn := self._turns.get(job)) is None:
                continue
            if hold.cause is Cause.NEVER and hold.blocker:  # the job that it was to start after failed
                turn.tell(NoRoom(hold.reason, never=True))
            elif hold.cause is Cause.NEVER:  # the planner knows more about why
                await turn.take(SlotGrant(replicas=1))
            else:
                turn.tell(NoRoom(hold.reason))
