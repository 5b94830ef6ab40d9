"""Builds of data sets beside jobs: lanes are pools of their own, decided about as slots are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entities.queue.decision import Cause, QueueDecision
from entities.queue.explanation import expected_start
from entities.queue.queue_rules import QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas, WorkKind
from entities.queue.reservations import SlotReservation
from entities.queue.scheduling import QueueSurroundings, decide
from entities.queue.slot_pools import MeshSlot, SlotNeeds, SlotTable
from entities.queue.tenant_shares import TenantQuota

NOW = 10_000.0


def mesh(slots: int = 4, lanes: int = 4) -> SlotTable:
    """Slots `s0`, …, and lanes `l0`, …, half of them in cluster a, the others in b."""
    places = [MeshSlot(slot=f"s{number}", node="n") for number in range(slots)]
    places += [
        MeshSlot(slot=f"l{number}", node="n", cluster="ab"[number * 2 // lanes], kind="lane", lane=True)
        for number in range(lanes)
    ]
    return SlotTable(places)


def asks(
    build: str, want: int = 1, *, least: int = 1, most: int = 0, at: float = 0.0, **more: Any
) -> JobRequest:
    fields = {"needs": SlotNeeds(lane=True), "work": WorkKind.PREPARATION, **more}
    replicas = Replicas(least=least, want=want, most=most or want)
    return JobRequest(job=build, submitted_at=at, replicas=replicas, **fields)


def job(name: str, slots: int, at: float = 0.0, **more: Any) -> JobRequest:
    return JobRequest(job=name, submitted_at=at, replica_slots=slots, **more)


def waits(request: JobRequest, **more: Any) -> QueuedJob:
    return QueuedJob(request=request, since=request.submitted_at, **more)


def works(request: JobRequest, *lanes: int, **more: Any) -> ActiveJob:
    fields = {"replicas": len(lanes), "started_at": 0.0, **more}
    return ActiveJob(request=request, slots=tuple(f"l{lane}" for lane in lanes), **fields)


def given(decision: QueueDecision) -> dict[str, set[str]]:
    return {each.job: set(each.slots) for each in decision.admissions}


def test_a_build_takes_lanes_and_no_slots_and_a_job_no_lanes() -> None:
    around = QueueSurroundings(table=mesh(slots=2, lanes=3))
    queue = [waits(job("j", 3)), waits(asks("b", 8, at=1)), waits(job("k", 2, at=2))]
    decision = decide(queue, [], around, NOW)
    assert given(decision) == {"b": {"l0", "l1", "l2"}, "k": {"s0", "s1"}}
    assert decision.holds["j"].cause is Cause.NEVER
    assert "needs 3 slots, the mesh has 2" in decision.holds["j"].reason


def test_a_job_without_room_holds_up_no_build_nor_a_build_a_job() -> None:
    around = QueueSurroundings(table=mesh())
    running = [ActiveJob(request=job("r", 4), replicas=1, slots=("s0", "s1", "s2", "s3"), started_at=0.0)]
    first = decide([waits(job("j", 4)), waits(asks("b", at=1))], running, around, NOW)
    assert given(first) == {"b": {"l0"}}
    working = [works(asks("w", 4, least=4), 0, 1, 2, 3)]
    other = decide([waits(asks("b", least=2, want=2)), waits(job("j", 4, at=1))], working, around, NOW)
    assert set(given(other)) == {"j"}
    assert other.holds["b"].reason.startswith("needs 2 lanes, 0 of 4 free")


def test_a_build_starts_with_its_minimum_or_not_at_all() -> None:
    around = QueueSurroundings(table=mesh(lanes=4))
    fixed = works(asks("w", 2, least=2), 0, 1)
    narrow = decide([waits(asks("b", 6, least=3))], [fixed], around, NOW)
    assert not narrow.admissions
    assert narrow.holds["b"].cause is Cause.ROOM
    wide = decide([waits(asks("b", 6, least=2))], [fixed], around, NOW)
    assert given(wide) == {"b": {"l2", "l3"}}


def test_builds_in_clusters_keep_to_their_lanes() -> None:
    around = QueueSurroundings(table=mesh(lanes=4))
    queue = [waits(asks("b", 4, needs=SlotNeeds(clusters=("b",), lane=True)))]
    assert given(decide(queue, [], around, NOW)) == {"b": {"l2", "l3"}}


def test_a_build_shrinks_for_one_that_waits_and_grows_into_idle_lanes() -> None:
    around = QueueSurroundings(table=mesh(lanes=4))
    wide = works(asks("wide", 4), 0, 1, 2, 3)
    decision = decide([waits(asks("b", 2, least=2))], [wide], around, NOW)
    (shrunk,) = decision.resizes
    assert (shrunk.job, shrunk.leaves) == ("wide", ("l3", "l2"))
    assert decision.holds["b"].cause is Cause.LEAVERS
    alone = decide([], [works(asks("b", 1, most=64), 0)], around, NOW)
    (grown,) = alone.resizes
    assert grown.replicas == 4, "idle lanes are grown into to the last"


def test_lanes_are_another_resource_in_fair_shares() -> None:
    """Who builds much waits for lanes behind others, and for slots behind nobody."""
    around = QueueSurroundings(table=mesh(slots=1, lanes=4), rules=QueueRules(order=QueueOrder.FAIR))
    running = [works(asks("w", 3, least=3, tenant="ann"), 0, 1, 2)]
    queue = [
        waits(asks("more", tenant="ann")),
        waits(asks("first", at=1, tenant="bob")),
        waits(job("j", 1, tenant="ann")),
        waits(job("k", 1, at=1, tenant="bob")),
    ]
    decision = decide(queue, running, around, NOW)
    assert given(decision) == {"first": {"l3"}, "j": {"s0"}}
    used = replace(around, used_slot_s={"lanes of bob": 1e9})
    assert set(given(decide(queue[:2], [], replace(used, table=mesh(1, 1)), NOW))) == {"more"}


def test_guaranteed_slots_are_no_lanes() -> None:
    quotas = {"ann": TenantQuota(slots=4), "bob": TenantQuota(slots=0)}
    rules = QueueRules(order=QueueOrder.FAIR, cool_down_s=0)
    around = QueueSurroundings(table=mesh(lanes=2), rules=rules, quotas=quotas)
    running = [works(asks("w", 2, least=2, tenant="bob"), 0, 1)]
    decision = decide([waits(asks("b", tenant="ann"))], running, around, NOW)
    assert not decision.parks, "who owns slots takes no lanes from others"
    assert decision.holds["b"].cause is Cause.ROOM


def test_a_build_of_a_higher_class_has_a_lower_one_park() -> None:
    rules = QueueRules(order=QueueOrder.PRIORITY, cool_down_s=0)
    around = QueueSurroundings(table=mesh(lanes=2), rules=rules)
    low = works(asks("low", 2, least=2), 0, 1)
    decision = decide([waits(asks("high", priority=1))], [low], around, NOW)
    assert [(park.job, park.blocker) for park in decision.parks] == [("low", "high")]


def test_reserved_slots_keep_no_lanes() -> None:
    kept = SlotReservation(name="night", start_at=NOW - 1, end_at=NOW + 100, count=4, tenant="ann")
    around = QueueSurroundings(table=mesh(), reservations=(kept,))
    decision = decide([waits(asks("b", tenant="bob")), waits(job("j", 1, tenant="bob"))], [], around, NOW)
    assert set(given(decision)) == {"b"}


@pytest.mark.parametrize("well", [True, False, None])
def test_a_job_after_a_build_starts_when_that_is_done(well: bool | None) -> None:
    done = {} if well is None else {"b": well}
    around = QueueSurroundings(table=mesh(), done=done)
    running = [] if done else [works(asks("b"), 0, work_s=60.0)]
    queue = [waits(job("j", 1, after=("b",)))]
    decision = decide(queue, running, around, NOW)
    if well:
        assert set(given(decision)) == {"j"}
    elif well is False:
        assert decision.holds["j"].cause is Cause.NEVER
    else:
        assert decision.holds["j"].reason == "starts after b is done"
        assert expected_start("j", queue, running, around, NOW).at == NOW + 60.0
