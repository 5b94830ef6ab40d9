"""The owner of the queue: it decides for all jobs, and drops a decision that came too late."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from entities.orchestrator.queue import job_queue
from entities.orchestrator.queue.admission import count_use, quotas_of
from entities.orchestrator.queue.job_queue import KEPT
from entities.orchestrator.queue.mesh_slots import job_request
from entities.queue import scheduling
from entities.queue.queued_job import JobRequest, QueuedJob, Replicas
from entities.queue.reservations import SlotReservation
from entities.queue.tenant_shares import DecayedUse, TenantQuota
from schemas.errors import BadInput, Conflict
from schemas.job import JobState
from schemas.queue import QueueShare
from schemas.usage import JobUsage
from tests.builders import jobs
from tests.builders.graphs import node, placement
from tests.builders.jobs import job as job_record
from tests.builders.queue_runs import Run, heard, mesh_of, queue_of


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


async def test_a_mesh_that_never_rests_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = await mesh_of(node("a", slots=2))
    restless, calm = Run("restless", 1, 0.0), Run("calm", 1, 1.0)
    restless.placements, decided, real = [placement("restless", 0)], 0, scheduling.decide

    def meanwhile(*facts: Any) -> Any:
        nonlocal decided
        decided += 1
        restless.leaving = set() if restless.leaving else {"restless"}
        return real(*facts)

    monkeypatch.setattr(job_queue, "decide", meanwhile)
    async with queue_of(mesh, restless, calm):
        await heard(calm, "calm")
    assert decided == job_queue.DECISION_TRIES


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
    assert quotas_of([jobs.job("other", user="bob", guaranteed_slots=0), old], fair=True) == {
        "ann": TenantQuota(slots=4),
        "bob": TenantQuota(slots=0),
    }
    assert quotas_of([new, old], fair=True) == {}
    share = QueueShare(running_slots=6, weight=2.0)
    limited = old.model_copy(update={"queue_share": share})
    assert quotas_of([limited], fair=True) == {"ann": TenantQuota(slots=4, most=6, weight=2.0)}
    assert quotas_of([limited], fair=False) == {"ann": TenantQuota(most=6, weight=2.0)}
    beyond = old.model_copy(update={"queue_share": QueueShare(running_slots=3)})
    assert quotas_of([beyond], fair=True) == {"ann": TenantQuota(slots=3, most=3)}
    both = [
        jobs.job(user, user=user, queue_share=share.model_copy(update={"tenant": "lab"}))
        for user in ("ann", "bob")
    ]
    assert quotas_of(both, fair=False) == {"tenant lab": TenantQuota(most=6, weight=2.0)}


async def test_a_tenants_users_share_the_most_that_may_run_under_any_order() -> None:
    """Four slots are free, and the lab has one of its two left: its next job but one waits, others don't."""
    mesh = await mesh_of(node("a", slots=5))
    runs = [Run("ann", 1, 0.0), Run("bob", 1, 1.0), Run("cy", 1, 2.0), Run("dan", 1, 3.0)]
    lab = QueueShare(tenant="lab", running_slots=2)
    for run in runs:
        own = lab if run.name != "dan" else QueueShare()
        run.record = run.record.model_copy(update={"user": run.name, "queue_share": own})
        run.request = job_request(run.record, run.record.spec)
        run.request = replace(run.request, submitted_at=float(runs.index(run)), replica_slots=1)
    runs[0].placements = [placement("ann", 0)]
    async with queue_of(mesh, *runs) as queue:
        await heard(runs[2], "tenant lab has 2 of at most 2 slots, this job needs 1")
        await heard(runs[1], "bob")
        await heard(runs[3], "dan")
        records = {run.name: run.record for run in runs}
        (place,) = (await queue.status(records, None)).jobs
        assert (place.job, place.cause) == ("cy", "quota")


async def test_the_weight_of_a_users_quota_counts_in_the_order_of_shares() -> None:
    """Both have a slot; to `two` twice as much is due, so the later job comes first."""
    mesh = await mesh_of(node("a", slots=2))
    runs = [Run("one", 1, 0.0), Run("two", 1, 1.0), Run("one-more", 1, 2.0), Run("two-more", 1, 3.0)]
    for run in runs:
        user = run.name[:3]
        share = QueueShare(weight=2.0 if user == "two" else 1.0)
        run.record = run.record.model_copy(update={"user": user, "queue_share": share})
        run.request = replace(run.request, tenant=user)
    runs[0].placements, runs[1].placements = [placement("one", 0)], [placement("two", 1)]
    async with queue_of(mesh, *runs, order="fair") as queue:
        records = {run.name: run.record for run in runs}
        assert [place.job for place in (await queue.status(records, None)).jobs] == ["two-more", "one-more"]


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
        kept = [place.slot for place in queue.occupied("")["a-n"] if place.sid == KEPT]
        assert kept == [2, 3], "a plan of a job that is not there is not offered them either"


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
        assert [reading.value for reading in queue.readings()] == [2, 0, 1, 4], "jobs, builds, free, lacking"
        told = await queue.status(records, "large")
        assert [place.job for place in told.jobs] == ["large"]
        assert told.explained is not None
        assert told.explained.starts_at == told.jobs[0].expected_at
        with pytest.raises(Conflict, match="job holder does not wait for slots"):
            await queue.status(records, "holder")


async def test_by_least_attained_service_a_job_parks_for_one_that_has_had_less() -> None:
    """Levels are 1, 4, 16 and 64 slot-hours; who is told to park is who loses fewest slot-seconds by it."""
    mesh = await mesh_of(node("a", slots=5))
    runs = [Run("new", 2, 2.0), Run("more", 2, 1.0), Run("wide", 3, 0.0), Run("narrow", 2, 0.0)]
    new, _, wide, narrow = runs
    for run, hours in zip(runs, (0.0, 2.0, 8.0, 8.0), strict=True):
        run.attained_slot_s = 3600.0 * hours
        run.since = time.time()  # else they would have aged
    wide.placements = [placement("wide", slot) for slot in range(3)]
    narrow.placements = [placement("narrow", slot) for slot in (3, 4)]
    async with queue_of(mesh, *runs, order="las") as queue:
        await heard(new, "waits for the exit of those who make room for it")
        records = {run.name: run.record for run in runs}
        status = await queue.status(records, None)
        assert [place.job for place in status.jobs] == ["new", "more"], "less service before an earlier turn"
        assert (narrow.gave_way, bool(wide.gave_way)) == ([("parks for new", False)], True)
        assert wide.gave_way == [("parks for more", False)], "the next claim parks who is left"


async def test_a_suggested_order_is_followed_within_the_class_and_until_it_is_taken_back() -> None:
    mesh = await mesh_of(node("a", slots=1))
    holder, runs = Run("holder", 1, 0.0), [Run(f"{name}0", 1, at) for at, name in enumerate("abc")]
    holder.placements = [placement("holder", 0)]
    records = {run.name: run.record for run in runs}
    async with queue_of(mesh, holder, *runs) as queue:

        async def line() -> str:
            return "".join(place.job[0] for place in (await queue.status(records, None)).jobs)

        assert await line() == "abc"
        queue.suggest_order(["c0", "b0"])
        assert await line() == "cba"
        holder.placements, holder.request = [], JobRequest(job="holder", submitted_at=9.0, replica_slots=9)
        await mesh.nudge()
        await heard(runs[2], "c0")
        assert not runs[0].placements
        queue.suggest_order(())
        assert await line() == "ab"


async def test_a_job_beside_another_is_placed_on_its_nodes_and_waits_while_it_has_none() -> None:
    mesh = await mesh_of(node("a", slots=2), node("b", slots=2))
    there, beside = Run("there", 1, 1.0), Run("beside", 1, 0.0)
    beside.request = replace(beside.request, beside=("there",))
    there.request = replace(there.request, held="held")
    async with queue_of(mesh, beside, there) as queue:
        await heard(beside, "no node of there is free for it")
        there.request = replace(there.request, held="")
        queue.again()
        await heard(there, "there")
        await mesh.nudge()
        await heard(beside, "beside")
    assert beside.nodes == frozenset({"a-n"})
