"""The owner of the queue: it decides for all jobs, and drops a decision that came too late."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue import job_queue
from entities.orchestrator.queue.job_queue import KEPT, JobQueue, SlotGrant
from entities.orchestrator.queue.mesh_slots import (
    count_use,
    guarantees,
    queue_rules,
)
from entities.queue import scheduling
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas
from entities.queue.reservations import SlotReservation
from entities.queue.tenant_shares import DecayedUse, TenantQuota
from schemas.errors import BadInput, Conflict
from schemas.job import JobState
from schemas.task_graph import Placement
from schemas.usage import JobUsage
from tests.builders import jobs
from tests.builders.graphs import node, placement
from tests.builders.jobs import job as job_record
from tests.patience import NEVER_S
from tests.waiting import eventually


class Run:
    """A job's run, as far as the queue looks at it."""

    def __init__(self, name: str, slots: int, at: float, *, work_s: float | None = None) -> None:
        self.name, self.work_s = name, work_s
        self.request = JobRequest(job=name, submitted_at=at, replica_slots=slots)
        self.placements: list[Placement] = []
        self.finds_room = False
        self.heard: list[Any] = []
        self.fails: Exception | None = None
        self.plans = 0
        self.nodes: frozenset[str] | None = None
        self.gave_way: list[tuple[str, bool]] = []
        self.notices: list[str] = []
        self.record = job_record(name, JobState.QUEUED)
        self.leaving: set[str] = set()
        self.resized: list[tuple[int, str]] = []
        self.replicas = 0

    def give_way(self, why: str, *, held: bool) -> bool:
        self.gave_way.append((why, held))
        return True

    def notify(self, text: str) -> None:
        self.notices.append(text)

    @property
    def waiting(self) -> QueuedJob | None:
        return None if self.placements else QueuedJob(request=self.request, since=0.0, work_s=self.work_s)

    @property
    def active(self) -> ActiveJob:
        replicas = self.replicas or 1
        return ActiveJob(
            request=self.request, replicas=replicas, slots=(), started_at=0.0, work_s=self.work_s
        )

    def resize(self, replicas: int, why: str) -> bool:
        self.resized.append((replicas, why))
        return True

    def plan(self, grant: SlotGrant) -> Any:
        """Takes the first slots that are free by its own count."""
        self.plans += 1
        self.nodes, self.replicas = grant.nodes, grant.replicas
        if self.fails is not None:
            raise self.fails
        first = sum(len(run.placements) for run in self.others())
        self.placements = [
            placement(self.name, first + number) for number in range(self.request.slots(grant.replicas))
        ]
        return self.name

    others: Callable[[], list[Run]] = staticmethod(list)


@asynccontextmanager
async def queue_of(
    mesh: MeshView,
    *runs: Run,
    order: str = "fcfs",
    there: dict[str, Run] | None = None,
    ended: dict[str, Any] | None = None,
) -> AsyncIterator[JobQueue]:
    """A queue that decides, and these jobs in it. `there` gets them, by name: what leaves it has ended."""
    there = {} if there is None else there
    there.update((run.name, run) for run in runs)
    queue = JobQueue(mesh, there, {} if ended is None else ended, queue_rules(order))

    async def wait(run: Run) -> None:
        run.others = lambda: list(runs)
        with queue.turn(run.name, run.plan) as turn:
            while not run.heard or isinstance(run.heard[-1], NoRoom):
                try:
                    run.heard.append(await turn.news())
                except BadInput as error:
                    run.heard.append(error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait(run)) for run in runs if not run.placements]
        tasks.append(group.create_task(queue.run()))
        yield queue
        for task in tasks:
            task.cancel()


async def heard(run: Run, text: str) -> None:
    async def said() -> bool:
        return any(text in (news.reason if isinstance(news, NoRoom) else str(news)) for news in run.heard)

    await eventually(said, every_s=0.01)


async def mesh_of(*nodes: Any) -> MeshView:
    mesh = MeshView()
    for each in nodes:
        await mesh.node(each)
    return mesh


async def test_jobs_start_in_turn_and_each_hears_why_it_waits() -> None:
    mesh = await mesh_of(node("a", slots=4))
    holder, large, small = Run("holder", 2, 0.0), Run("large", 4, 1.0), Run("small", 1, 2.0)
    holder.placements = [placement("holder", 0), placement("holder", 1)]
    async with queue_of(mesh, holder, large, small):
        await heard(large, "needs 4 slots, 2 of 4 free")
        await heard(small, "behind large")
        holder.placements = []
        holder.request = JobRequest(job="holder", submitted_at=9.0, replica_slots=9)
        await mesh.nudge()
        await heard(large, "large")
        assert small.placements == []
        large.placements = []
        large.request = holder.request
        await mesh.nudge()
        await heard(small, "small")


async def test_a_decision_that_came_too_late_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job takes the slot between the decision and its being carried out."""
    mesh = await mesh_of(node("a", slots=1))
    quick, late = Run("quick", 1, 9.0), Run("late", 1, 0.0)
    decided, real = [], scheduling.decide

    def meanwhile(*facts: Any) -> Any:
        decision = real(*facts)
        decided.append([admission.job for admission in decision.admissions])
        quick.placements = [placement("quick", 0)]
        return decision

    monkeypatch.setattr(job_queue, "decide", meanwhile)
    quick.placements = [placement("quick", 5)]  # not in the mesh: it holds nothing
    async with queue_of(mesh, quick, late):
        await heard(late, "needs 1 slots, 0 of 1 free")
    assert decided[0] == ["late"], "the first decision was to be the wrong one"
    assert late.plans == 0


async def test_while_many_jobs_are_asked_others_have_the_loop() -> None:
    """The leader renews its lease on the same loop."""
    asked_at_once = most = 0

    class Counted(Run):
        @property
        def waiting(self) -> QueuedJob | None:
            nonlocal asked_at_once, most
            asked_at_once += 1
            most = max(most, asked_at_once)
            return super().waiting

    async def others() -> None:
        nonlocal asked_at_once
        while True:
            asked_at_once = 0
            await asyncio.sleep(0)

    mesh = await mesh_of(node("a", slots=1))
    runs = [Counted(f"j{number:04}", 1, float(number)) for number in range(4 * job_queue.ASKED_AT_ONCE)]
    async with queue_of(mesh, *runs):
        beside = asyncio.create_task(others())
        await heard(runs[-1], "")
        beside.cancel()
    assert 0 < most <= job_queue.ASKED_AT_ONCE


async def test_an_error_of_a_plan_ends_that_job_and_not_the_queue() -> None:
    mesh = await mesh_of(node("a", slots=2))
    bad, good = Run("bad", 1, 0.0), Run("good", 1, 1.0)
    bad.fails = BadInput("no such layer")
    async with queue_of(mesh, bad, good):
        await heard(bad, "no such layer")
        await heard(good, "good")


async def test_a_lost_instance_is_replaced_before_the_queue_goes_on() -> None:
    mesh = await mesh_of(node("a", slots=2))
    running, next_one = Run("running", 1, 0.0), Run("next", 1, 1.0)
    running.placements, running.finds_room = [placement("running", 0)], True
    async with queue_of(mesh, running, next_one):
        await heard(next_one, "behind a running job that replaces an instance")
        running.finds_room = False
        await mesh.nudge()
        await heard(next_one, "next")


async def test_a_job_parks_once_for_one_with_a_stronger_claim() -> None:
    mesh = await mesh_of(node("a", slots=1))
    low, high = Run("low", 1, 0.0), Run("high", 1, 1.0)
    low.placements = [placement("low", 0)]
    high.request = replace(high.request, priority=1)
    async with queue_of(mesh, low, high, order="priority"):
        await heard(high, "waits for the exit of those who make room for it")
        await mesh.nudge()
        low.placements = []
        low.request = replace(low.request, held="parked")
        await mesh.nudge()
        await heard(high, "high")
    assert low.gave_way == [("parks for high", False)]


async def test_a_job_is_told_before_it_parks_and_goes_on_if_nobody_needs_its_slots_any_more() -> None:
    mesh = await mesh_of(node("a", slots=1))
    low, high, higher = Run("low", 1, 0.0), Run("high", 1, 1.0), Run("higher", 1, 2.0)
    low.placements = [placement("low", 0)]
    low.request = replace(low.request, notice_s=NEVER_S)
    high.request = replace(high.request, priority=1)
    higher.request = replace(higher.request, priority=2, held="held")
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (low, high, higher)}
    async with queue_of(mesh, low, high, higher, order="priority") as queue:
        await heard(high, "waits for the exit of those who make room for it")
        assert re.fullmatch(r"parks at \S+ UTC, unless it ends before: parks for high", low.notices[-1])
        (notice,) = (await queue.status(records, None)).notices
        assert (notice.job, notice.blocker) == ("low", "high")
        assert notice.at > time.time() + NEVER_S / 2
        high.request = replace(high.request, held="parked by rita")
        low.request = replace(low.request, notice_s=0.05)
        queue.again()
        await heard(high, "parked by rita")
        assert low.notices[-1] == "does not park: high needs its slots no more"
        higher.request = replace(higher.request, held="")
        queue.again()
        await heard(higher, "waits for the exit of those who make room for it")
        assert "unless it ends before: parks for higher" in low.notices[-1]

        async def gave_way() -> bool:
            return bool(low.gave_way)

        await eventually(gave_way, every_s=0.01)  # by the queue's own clock: nothing else happens
        assert low.gave_way == [("parks for higher", False)]


async def test_a_user_gets_guaranteed_slots_back_from_who_borrowed_them() -> None:
    mesh = await mesh_of(node("a", slots=2))
    runs = [Run("b0", 1, 0.0), Run("b1", 1, 1.0), Run("own", 1, 2.0), Run("more", 1, 3.0)]
    users = ("bob", "bob", "ann", "ann")
    for run, user in zip(runs, users, strict=True):
        run.request = replace(run.request, tenant=user)
        run.record = run.record.model_copy(update={"user": user})
    *borrowers, own, more = runs
    for slot, run in enumerate(borrowers):
        run.placements = [placement(run.name, slot)]
    own.record = own.record.model_copy(update={"guaranteed_slots": 1})
    more.record = more.record.model_copy(update={"guaranteed_slots": 1, "submitted_at": 3.0})
    async with queue_of(mesh, *runs, order="fair"):
        await heard(own, "waits for the exit of those who make room for it")
        await heard(more, "needs 1 slots")
        await mesh.nudge()
        gave_way = [given for run in borrowers for given in run.gave_way]
        assert gave_way == [("parks for own, within the slots guaranteed to ann", False)]


async def test_what_ended_jobs_have_used_counts_for_their_user() -> None:
    """A new leader counts it again from their records, in any order."""
    mesh = await mesh_of(node("a", slots=1))
    first, second, holder = Run("first", 1, 0.0), Run("second", 1, 1.0), Run("holder", 1, 2.0)
    holder.placements = [placement("holder", 0)]
    for run, user in ((first, "ann"), (second, "bob")):
        run.request = replace(run.request, tenant=user)
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (first, second)}
    used = JobUsage(slot_s=3600.0, held_s=3600.0, counted_at=time.time())
    async with queue_of(mesh, first, second, holder, order="fair") as queue:
        assert [place.job for place in (await queue.status(records, None)).jobs] == ["first", "second"]
        queue.job_ended(job_record("old", JobState.DONE, user="ann", usage=used))
        assert [place.job for place in (await queue.status(records, None)).jobs] == ["second", "first"]


def test_a_users_guarantee_is_that_of_the_newest_job() -> None:
    old, new = jobs.job("old", user="ann", guaranteed_slots=4), jobs.job("new", user="ann", submitted_at=2.0)
    assert guarantees([jobs.job("other", user="bob", guaranteed_slots=0), old]) == {
        "ann": TenantQuota(slots=4),
        "bob": TenantQuota(slots=0),
    }
    assert guarantees([new, old]) == {}


def test_a_running_job_counts_until_now_and_an_ended_one_until_its_end() -> None:
    usage, use = JobUsage(slot_s=10.0, held_s=5.0, slots=2, counted_at=100.0), DecayedUse(1e12)
    count_use(use, jobs.job("runs", user="ann", usage=usage), 110.0)
    count_use(use, jobs.job("done", JobState.DONE, user="bob", usage=usage), 110.0)
    count_use(use, jobs.job("never", user="cy"), 110.0)
    assert use.at(110.0) == pytest.approx({"ann": 30.0, "bob": 10.0})


async def test_a_running_job_shrinks_for_one_that_waits_and_grows_into_what_nobody_needs() -> None:
    mesh = await mesh_of(node("a", slots=4))
    wide, late = Run("wide", 1, 0.0), Run("late", 1, 1.0)
    wide.request = replace(wide.request, replicas=Replicas(least=1, want=2, most=4))
    wide.placements, wide.replicas = [placement("wide", slot) for slot in range(3)], 3
    late.request = replace(late.request, held="held")
    async with queue_of(mesh, wide, late) as queue:
        await heard(late, "held")
        assert wide.resized[-1] == (4, "grows to 4 replicas into idle slots")
        wide.placements, wide.replicas = [placement("wide", slot) for slot in range(4)], 4
        late.request = replace(late.request, held="")
        queue.again()
        await heard(late, "waits for the exit of those who make room for it")
        assert wide.resized[-1] == (3, "makes room for late")
        wide.leaving, wide.replicas = {"wide-3"}, 3
        await mesh.nudge()
        assert late.placements == []


async def test_slots_that_are_kept_go_to_their_user_alone() -> None:
    mesh = await mesh_of(node("a", slots=4))
    other, own = Run("other", 3, 0.0), Run("own", 2, 1.0)
    own.request = replace(own.request, tenant="rita")
    now = time.time()
    window = SlotReservation(name="night", start_at=now - 1, end_at=now + 1e6, count=2, tenant="rita")
    async with queue_of(mesh, other, own) as queue:
        queue.reservations = lambda at: (window,)
        queue.again()
        await heard(own, "own")
        await heard(other, "needs 3 slots")
        kept = [place.slot for place in queue.occupied("other")["a-n"] if place.sid == KEPT]
        assert kept == [2, 3]
        assert [place for place in queue.occupied("own").get("a-n", []) if place.sid == KEPT] == []


async def test_a_job_waits_for_those_that_it_names() -> None:
    mesh = await mesh_of(node("a", slots=2))
    first, second = Run("first", 1, 0.0), Run("second", 1, 1.0)
    first.placements = [placement("first", 0)]
    second.request = replace(second.request, after=("first",))
    there: dict[str, Run] = {}
    ended: dict[str, Any] = {}
    async with queue_of(mesh, first, second, there=there, ended=ended):
        await heard(second, "starts after first is done")
        ended["first"] = job_record("first", JobState.DONE)
        del there["first"]
        await mesh.nudge()
        await heard(second, "second")


async def test_a_job_fails_if_one_that_it_waits_for_did() -> None:
    second = Run("second", 1, 1.0)
    second.request = replace(second.request, after=("first",))
    mesh, ended = await mesh_of(node("a", slots=2)), {"first": job_record("first", JobState.FAILED)}
    async with queue_of(mesh, second, ended=ended):
        await heard(second, "was to start after first, which was not done: submit it without that")
    assert second.heard[-1].never
    assert not second.placements


async def test_a_job_that_keeps_away_from_another_is_placed_on_other_nodes() -> None:
    mesh = await mesh_of(node("a", slots=2), node("b", slots=2))
    there, away, anywhere = Run("there", 1, 0.0), Run("away", 1, 1.0), Run("anywhere", 1, 2.0)
    there.placements = [placement("there", 0)]
    away.request = replace(away.request, apart=("there",))
    async with queue_of(mesh, there, away, anywhere):
        await heard(away, "away")
        await heard(anywhere, "anywhere")
    assert (away.nodes, anywhere.nodes) == (frozenset({"b-n"}), None)


async def test_people_are_told_who_waits_for_what_and_until_when() -> None:
    mesh = await mesh_of(node("a", slots=4))
    holder, large, small = Run("holder", 3, 0.0, work_s=100.0), Run("large", 4, 1.0), Run("small", 1, 2.0)
    holder.placements = [placement("holder", slot) for slot in range(3)]
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (holder, large, small)}
    async with queue_of(mesh, holder, large, small) as queue:
        status = await queue.status(records, None)
        assert (status.order, status.slots, status.free, status.waiting, status.lacking) == (
            "fcfs",
            4,
            1,
            2,
            4,
        )
        assert [(place.position, place.job, place.blocker) for place in status.jobs] == [
            (1, "large", ""),
            (2, "small", "large"),
        ]
        assert [reading.value for reading in queue.readings()] == [2, 1, 4]
        told = await queue.status(records, "large")
        assert [place.job for place in told.jobs] == ["large"]
        assert told.explained is not None
        assert told.explained.starts_at == told.jobs[0].expected_at
        with pytest.raises(Conflict, match="job holder does not wait for slots"):
            await queue.status(records, "holder")
