"""The queue's decisions: gangs, backfill, sizes, parks, quotas, reservations, and what a job is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entities.queue import explanation
from entities.queue.decision import Cause, QueueDecision
from entities.queue.explanation import explain
from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas
from entities.queue.reservations import SlotReservation, counting, too_many
from entities.queue.scheduling import QueueSurroundings, decide
from entities.queue.slot_pools import MeshSlot, SlotNeeds, SlotTable
from entities.queue.tenant_shares import DecayedUse, TenantQuota

NOW = 10_000.0


def mesh(count: int = 8, *, nodes: int = 2, **slot: Any) -> SlotTable:
    return SlotTable(
        MeshSlot(slot=f"s{number}", node=f"n{number * nodes // count}", **slot) for number in range(count)
    )


def asks(
    job: str, size: int = 1, *, least: int = 0, most: int = 0, at: float = 0.0, **more: Any
) -> JobRequest:
    replicas = Replicas(least=least or size, want=size, most=most or size)
    return JobRequest(job=job, submitted_at=at, replicas=replicas, **more)


def waits(request: JobRequest, work_s: float | None = 1000.0, **more: Any) -> QueuedJob:
    return QueuedJob(request=request, since=request.submitted_at, work_s=work_s, **more)


def runs(request: JobRequest, *slots: int, work_s: float | None = 1000.0, **more: Any) -> ActiveJob:
    fields = {"started_at": 0.0, "replicas": len(slots), **more}
    names = tuple(f"s{slot}" for slot in slots)
    return ActiveJob(request=request, slots=names, work_s=work_s, **fields)


def started(decision: QueueDecision) -> dict[str, int]:
    return {admission.job: len(admission.slots) for admission in decision.admissions}


def test_all_units_of_a_job_start_or_none() -> None:
    around = QueueSurroundings(table=mesh(4))
    decision = decide([waits(asks("a", 5)), waits(asks("b", 4, at=1))], [], around, NOW)
    assert started(decision) == {"b": 4}
    assert decision.holds["a"].cause is Cause.NEVER
    assert "needs 5 slots, the mesh has 4" in decision.holds["a"].reason


def test_a_job_that_fits_nowhere_is_told_so_and_not_whom_it_is_behind() -> None:
    around = QueueSurroundings(table=mesh(4))
    queue = [waits(asks("a", 2)), waits(asks("b", 5, at=1)), waits(asks("c", 1, at=2))]
    holds = decide(queue, [runs(asks("r", 3), 0, 1, 2)], around, NOW).holds
    assert holds["a"].reason == "needs 2 slots, 1 of 4 free: waiting for a job to end or a node to join"
    assert holds["b"].cause is Cause.NEVER


def test_a_job_that_does_not_delay_the_first_starts_before_it() -> None:
    around = QueueSurroundings(table=mesh(4))
    running = [runs(asks("r", 3), 0, 1, 2, work_s=100)]
    large, short, long = asks("large", 4), asks("short", at=1), asks("long", at=2)
    decision = decide([waits(large), waits(short, 90), waits(long, 110)], running, around, NOW)
    assert started(decision) == {"short": 1}
    assert decision.holds["large"].expected_at == NOW + 100
    only_long = decide([waits(large), waits(long, 110)], running, around, NOW)
    assert started(only_long) == {}
    assert only_long.holds["long"].blocker == "large"


def test_a_long_job_may_take_what_the_first_leaves() -> None:
    around = QueueSurroundings(table=mesh(4))
    running = [runs(asks("r", 3), 0, 1, 2, work_s=100)]
    decision = decide([waits(asks("large", 3)), waits(asks("long", at=1), 9e9)], running, around, NOW)
    assert started(decision) == {"long": 1}


def test_nobody_passes_a_job_whose_start_is_unknown() -> None:
    around = QueueSurroundings(table=mesh(4))
    running = [runs(asks("r", 3), 0, 1, 2, work_s=None)]
    queue = [waits(asks("large", 4)), waits(asks("small", at=1), 1)]
    assert started(decide(queue, running, around, NOW)) == {}
    first_fit = QueueSurroundings(table=mesh(4), rules=QueueRules(backfill=Backfill.ANY))
    assert started(decide(queue, running, first_fit, NOW)) == {"small": 1}


def test_a_job_that_may_use_other_slots_waits_for_nobody() -> None:
    table = SlotTable(
        [MeshSlot(slot=f"s{number}", node="n", kind="cuda" if number < 2 else "cpu") for number in range(4)]
    )
    on_cuda, on_cpu = SlotNeeds(kind="cuda"), SlotNeeds(kind="cpu")
    running = [runs(asks("r", needs=on_cuda), 0, work_s=None)]
    queue = [waits(asks("a", 2, needs=on_cuda)), waits(asks("b", 2, at=1, needs=on_cpu), None)]
    assert started(decide(queue, running, QueueSurroundings(table=table), NOW)) == {"b": 2}


def test_others_shrink_before_anybody_parks_and_the_job_waits_for_their_exit() -> None:
    around = QueueSurroundings(table=mesh(4), rules=QueueRules(order=QueueOrder.PRIORITY))
    elastic, rigid = asks("elastic", 3, least=1, most=3), asks("rigid")
    running = [runs(elastic, 0, 1, 2), runs(rigid, 3)]
    urgent = waits(asks("urgent", 2, priority=1))
    decision = decide([urgent], running, around, NOW)
    (resize,) = decision.resizes
    assert (resize.job, resize.replicas, set(resize.leaves)) == ("elastic", 1, {"s1", "s2"})
    assert decision.parks == []
    assert decision.admissions == []
    assert decision.holds["urgent"].cause is Cause.LEAVERS
    leaving = runs(elastic, 0, 1, 2, replicas=1, leaving=frozenset(resize.leaves), leaves_at=NOW + 5)
    meanwhile = decide([urgent, waits(asks("later", at=1))], [leaving, running[1]], around, NOW + 1)
    assert not meanwhile.changes
    after = decide([urgent], [runs(elastic, 0), running[1]], around, NOW + 5)
    assert started(after) == {"urgent": 2}


def test_the_weakest_claim_that_is_enough_parks() -> None:
    around = QueueSurroundings(table=mesh(8), rules=QueueRules(order=QueueOrder.PRIORITY))
    running = [
        runs(asks("low", 2, priority=0), 0, 1),
        runs(asks("low-large", 4, priority=0), 2, 3, 4, 5),
        runs(asks("high", 2, priority=5), 6, 7),
    ]
    decision = decide([waits(asks("urgent", 3, priority=9))], running, around, NOW)
    assert [park.job for park in decision.parks] == ["low-large"]
    assert not decide([waits(asks("peer", 3, priority=0))], running, around, NOW).parks


def test_a_job_parks_at_most_once_per_cool_down_and_after_its_notice() -> None:
    rules = QueueRules(order=QueueOrder.PRIORITY, cool_down_s=600, notice_s=60)
    around = QueueSurroundings(table=mesh(1), rules=rules)
    urgent = [waits(asks("urgent", priority=1))]
    fresh = [runs(asks("r"), 0, started_at=NOW - 599)]
    assert not decide(urgent, fresh, around, NOW).parks
    assert decide(urgent, fresh, around, NOW).next_at == NOW + 1
    parked_before = [runs(asks("r"), 0, parked_at=NOW - 599)]
    assert not decide(urgent, parked_before, around, NOW).parks
    (park,) = decide(urgent, fresh, around, NOW + 1).parks
    assert park.at == NOW + 61


def test_idle_slots_are_grown_into_while_that_is_worth_it() -> None:
    around = QueueSurroundings(table=mesh(32))
    request = asks("r", 1, most=32, growth=0.8)
    (resize,) = decide([], [runs(request, 0)], around, NOW).resizes
    assert resize.replicas == 9  # one more would save less than a tenth of a step
    assert request.gain(8, 9) >= 0.1 > request.gain(9, 10)
    recently = [runs(request, 0, resized_at=NOW - 1)]
    paused = decide([], recently, around, NOW)
    assert not paused.resizes
    assert paused.next_at == NOW + 59


def test_a_job_grows_to_the_next_number_that_helps_and_starts_with_no_needless_replica() -> None:
    """With four microbatches three replicas take as long as two."""
    around = QueueSurroundings(table=mesh(8))
    request = asks("r", 1, most=6, speeds=(1.0, 2.0, 2.0, 4.0, 4.0, 4.0))
    (resize,) = decide([], [runs(request, 0, 1)], around, NOW).resizes
    assert resize.replicas == 4
    assert not decide([], [runs(request, 0, 1, 2, 3)], around, NOW).resizes
    assert not decide([], [runs(request, 0, 1), runs(asks("o", 5), *range(2, 7))], around, NOW).resizes
    wide = waits(asks("w", 4, least=1, speeds=(0.25, 0.5, 0.5, 1.0)))
    assert started(decide([wide], [runs(asks("o", 5), *range(5))], around, NOW)) == {"w": 2}


def test_a_job_that_can_be_told_nothing_keeps_its_slots() -> None:
    """It is being brought back, say: nobody counts on its shrinking, growing or parking."""
    around = QueueSurroundings(table=mesh(4), rules=QueueRules(order=QueueOrder.PRIORITY, cool_down_s=0))
    fixed = runs(asks("r", 2, least=1, most=4), 0, 1, 2, fixed=True)
    decision = decide([waits(asks("w", 2, priority=1))], [fixed], around, NOW)
    assert not decision.resizes
    assert not decision.parks
    assert decision.holds["w"].cause is Cause.ROOM
    assert not decide([], [fixed], around, NOW).resizes


def test_fair_shares_count_what_was_used_and_reclaim_what_is_borrowed() -> None:
    rules = QueueRules(order=QueueOrder.FAIR)
    queue = [waits(asks("a", tenant="x")), waits(asks("b", at=1, tenant="y"))]
    used = QueueSurroundings(table=mesh(1), rules=rules, used_slot_s={"x": 1e6})
    assert started(decide(queue, [], used, NOW)) == {"b": 1}
    quotas = {"x": TenantQuota(slots=2), "y": TenantQuota(slots=2, most=3)}
    around = QueueSurroundings(table=mesh(4), rules=rules, quotas=quotas)
    running = [runs(asks(f"x{slot}", tenant="x", at=slot), slot) for slot in range(4)]
    decision = decide([waits(asks("y", 2, tenant="y"))], running, around, NOW)
    assert len(decision.parks) == 2
    excess = decide([waits(asks("y", 4, tenant="y"))], running, around, NOW).holds["y"]
    assert excess.cause is Cause.QUOTA
    assert "at most 3" in excess.reason
    assert not decide([waits(asks("x9", tenant="x"))], running, around, NOW).parks


def test_no_more_is_reclaimed_than_was_borrowed() -> None:
    """Of x three slots are borrowed: y gets those, and x keeps what is its own, even in later decisions."""
    rules = QueueRules(order=QueueOrder.FAIR, cool_down_s=0)
    quotas = {"x": TenantQuota(slots=3), "y": TenantQuota(slots=6)}
    around = QueueSurroundings(table=mesh(6), rules=rules, quotas=quotas)
    running = [runs(asks(f"x{slot}", tenant="x", at=slot), slot) for slot in range(6)]
    line = [waits(asks(f"y{number}", tenant="y", at=number)) for number in range(6)]
    decision = decide(line, running, around, NOW)
    parks = {park.job: park for park in decision.parks}
    assert len(parks) == 3
    assert {park.blocker for park in parks.values()} == {"y0", "y1", "y2"}
    told = [replace(job, parks_at=NOW + 60) if job.request.job in parks else job for job in running]
    assert not decide(line, told, around, NOW).parks


def test_a_tenant_reclaims_no_more_than_its_own() -> None:
    """Room is being made for its first job: its second one is not within its own any more."""
    rules = QueueRules(order=QueueOrder.FAIR, cool_down_s=0)
    around = QueueSurroundings(table=mesh(4), rules=rules, quotas={"y": TenantQuota(slots=2)})
    running = [runs(asks(f"x{slot}", 2, tenant="x"), slot, slot + 1) for slot in (0, 2)]
    line = [waits(asks(f"y{number}", 2, tenant="y", at=number)) for number in range(2)]
    (park,) = decide(line, running, around, NOW).parks
    told = [replace(job, parks_at=NOW + 60) if job.request.job == park.job else job for job in running]
    assert not decide(line, told, around, NOW).parks


def test_who_borrows_shrinks_before_anybody_parks() -> None:
    rules = QueueRules(order=QueueOrder.FAIR, cool_down_s=0)
    around = QueueSurroundings(table=mesh(4), rules=rules, quotas={"y": TenantQuota(slots=2)})
    wide = runs(asks("x", 4, least=2, tenant="x"), 0, 1, 2, 3)
    decision = decide([waits(asks("y", 2, tenant="y"))], [wide], around, NOW)
    assert not decision.parks
    assert [(each.job, each.replicas) for each in decision.resizes] == [("x", 2)]


def test_nobody_shrinks_below_what_it_wants_out_of_its_users_own_slots() -> None:
    rules = QueueRules(order=QueueOrder.FAIR, cool_down_s=0)
    quotas = {"x": TenantQuota(slots=3), "y": TenantQuota(slots=1)}
    around = QueueSurroundings(table=mesh(4), rules=rules, quotas=quotas)
    own = runs(asks("own", 3, least=1, tenant="x"), 0, 1, 2, work_s=500)
    for tenant in "yz":
        decision = decide([waits(asks("w", 2, tenant=tenant))], [own], around, NOW)
        assert not decision.changes
        assert decision.holds["w"].expected_at == NOW + 500
    (resize,) = decide([waits(asks("w", 2, tenant="x"))], [own], around, NOW).resizes
    assert resize.replicas == 2, "for a job of the same user it does"
    wide = runs(asks("wide", 4, least=1, tenant="x"), 0, 1, 2, 3)
    line = [waits(asks(f"w{number}", tenant="y", at=number)) for number in range(3)]
    (resize,) = decide(line, [wide], around, NOW).resizes
    assert resize.replicas == 3, "one slot is borrowed"
    grown = runs(asks("grown", 2, least=1, most=4, tenant="x"), 0, 1, 2, 3)
    (resize,) = decide([waits(asks("z", 2, tenant="z"))], [grown], around, NOW).resizes
    assert resize.replicas == 2, "what it has beyond what it wants was idle"
    both = [runs(asks(f"r{first}", 2, least=1, tenant="x"), first, first + 1) for first in (0, 2)]
    assert not decide([waits(asks("w", 2, tenant="z"))], both, around, NOW).changes, "all or nothing"


def test_use_is_forgotten_by_half_lives_however_it_is_counted() -> None:
    hour = 3600.0
    use = DecayedUse(hour)
    use.add("x", 100.0, 0.0, NOW)
    assert use.at(NOW + hour)["x"] == pytest.approx(50.0)
    whole, parts = DecayedUse(hour), DecayedUse(hour)
    whole.add("x", 2 * 600.0, 600.0, NOW)
    for part in (3, 1, 0, 5, 2, 4):  # a new leader reads records in any order
        parts.add("x", 2 * 100.0, 100.0, NOW - 100.0 * part)
    assert parts.at(NOW)["x"] == pytest.approx(whole.at(NOW)["x"])
    assert 600.0 < whole.at(NOW)["x"] < 1200.0


def test_a_job_is_told_of_its_park_as_long_before_as_it_asks() -> None:
    rules = QueueRules(order=QueueOrder.PRIORITY, cool_down_s=0, notice_s=10)
    around = QueueSurroundings(table=mesh(2), rules=rules)
    (park,) = decide(
        [waits(asks("urgent", 2, priority=1))], [runs(asks("r", 2, notice_s=60), 0, 1)], around, NOW
    ).parks
    assert (park.at, park.blocker) == (NOW + 60, "urgent")
    limited = runs(asks("r", notice_s=60, wall_time_s=100), 0, ran_s=39)
    assert decide([], [limited], around, NOW).next_at == NOW + 1
    (over,) = decide([], [replace(limited, ran_s=40)], around, NOW).parks
    assert (over.at, over.held) == (NOW + 60, True)
    window = SlotReservation(name="night", start_at=NOW + 100, end_at=NOW + 500, count=2)
    around = QueueSurroundings(table=mesh(2), rules=rules, reservations=(window,))
    slow, brief = runs(asks("slow", notice_s=90), 0), runs(asks("brief"), 1)
    assert decide([], [slow, brief], around, NOW - 21).next_at == NOW - 20
    early = decide([], [slow, brief], around, NOW - 20)
    assert [(each.job, each.at, each.blocker) for each in early.parks] == [("slow", NOW + 70, "night")]
    assert early.next_at == NOW + 60
    (late,) = decide([], [slow], around, NOW + 90).parks  # the reservation came late; its notice counts
    assert late.at == NOW + 180


def test_until_its_wall_time_is_over_a_job_holds_its_slots_however_early_it_was_told() -> None:
    rules = QueueRules(order=QueueOrder.FAIR, cool_down_s=0)
    around = QueueSurroundings(table=mesh(4), rules=rules, quotas={"x": TenantQuota(most=3)})
    limited = runs(asks("limited", 3, tenant="x", notice_s=600, wall_time_s=600), 0, 1, 2, work_s=None)
    (order,) = decide([], [limited], around, NOW).parks
    told = replace(limited, ran_s=100, parks_at=order.at, over_time=True)
    line = [waits(asks("large", 2, tenant="y")), waits(asks("brief", at=1, tenant="y"), 400)]
    for running in (limited, told):
        decision = decide(line, [running], around, NOW + running.ran_s)
        assert decision.holds["large"].cause is Cause.ROOM, "nobody makes room for it"
        assert decision.holds["large"].expected_at == NOW + 600
        assert started(decision) == {"brief": 1}, "no slot is kept idle until then"
    assert decide([waits(asks("more", tenant="x"))], [told], around, NOW).holds["more"].cause is Cause.QUOTA
    elastic = runs(asks("e", 3, least=1, notice_s=600, wall_time_s=600), 0, 1, 2, parks_at=NOW + 600)
    elastic = replace(elastic, over_time=True)
    (resize,) = decide([waits(asks("y", 3))], [elastic], QueueSurroundings(table=mesh(4)), NOW).resizes
    assert resize.replicas == 1
    night = SlotReservation(name="night", start_at=NOW + 60, end_at=NOW + 9e9, count=2)
    reserved = QueueSurroundings(table=mesh(4), reservations=(night,))
    assert not decide([], [told], reserved, NOW + 60).parks, "it leaves before its notice would end"


def test_slots_of_a_reservation_are_left_in_time_and_only_its_tenant_gets_them() -> None:
    window = SlotReservation(name="night", start_at=NOW + 100, end_at=NOW + 500, count=2, tenant="x")
    around = QueueSurroundings(table=mesh(4), reservations=(window,))
    long, short = waits(asks("long", 4), 1000), waits(asks("short", 4), 50)
    hold = decide([long], [], around, NOW).holds["long"]
    assert hold.cause is Cause.RESERVED
    assert hold.reason == "needs 4 slots, 2 of 4 free, 2 kept by reservation night"
    assert started(decide([short], [], around, NOW)) == {"short": 4}
    assert started(decide([waits(asks("half", 2), 1000)], [], around, NOW)) == {"half": 2}
    stranger = runs(asks("stranger", 2), 2, 3)
    (park,) = decide([], [stranger], around, NOW + 80).parks
    assert park.job == "stranger"
    assert "night" in park.reason
    assert park.at <= NOW + 100
    behind = [waits(asks("other", 4), 1000), waits(asks("mine", 2, at=1, tenant="x"))]
    assert started(decide(behind, [], around, NOW + 100)) == {"mine": 2}


def test_for_a_reservation_a_job_gives_up_its_last_replicas_or_parks() -> None:
    """The orchestrator takes the last ones, wherever they are."""
    window = SlotReservation(name="night", start_at=NOW, end_at=NOW + 500, count=2)
    around = QueueSurroundings(table=mesh(4), reservations=(window,))
    spread = asks("spread", 3, least=1)
    (resize,) = decide([], [runs(spread, 0, 3, 1)], around, NOW).resizes
    assert (resize.replicas, resize.leaves) == (1, ("s1", "s3"))
    last_only = decide([], [runs(spread, 0, 1, 2)], around, NOW)
    assert [(each.replicas, each.leaves) for each in last_only.resizes] == [(2, ("s2",))]
    (park,) = decide([], [runs(spread, 3, 0, 1)], around, NOW).parks
    assert (park.job, park.blocker) == ("spread", "night")
    pairs = asks("pairs", 2, least=1, replica_slots=2)
    assert decide([], [runs(pairs, 0, 2, 1, 3, replicas=2)], around, NOW).parks


def test_a_job_with_fewer_replicas_than_it_wants_runs_longer_and_may_reach_into_a_reservation() -> None:
    window = SlotReservation(name="night", start_at=NOW + 100, end_at=NOW + 500, count=2)
    around = QueueSurroundings(table=mesh(4), reservations=(window,))
    other = runs(asks("other", 2), 0, 1)
    late, early = waits(asks("late", 4, least=1), 60), waits(asks("early", 4, least=1), 40)
    assert decide([late], [other], around, NOW).holds["late"].cause is Cause.RESERVED
    assert started(decide([early], [other], around, NOW)) == {"early": 2}


def test_a_reservation_keeps_its_slots_when_one_beside_it_ends() -> None:
    """Else a job would have to leave its slots for one that has had others all the time."""
    over = SlotReservation(name="a", start_at=NOW - 100, end_at=NOW, count=2, tenant="x")
    goes_on = SlotReservation(name="b", start_at=NOW - 50, end_at=NOW + 500, count=1, tenant="y")
    long_ago = SlotReservation(name="c", start_at=NOW - 900, end_at=NOW - 800, count=1)
    kept = counting((over, goes_on, long_ago), NOW)
    assert {each.name for each in kept} == {"a", "b"}
    around = QueueSurroundings(table=mesh(4), reservations=kept)
    decision = decide([], [runs(asks("mine", 2, tenant="x"), 2, 3)], around, NOW)
    assert not decision.parks
    assert not decision.resizes
    assert counting(kept, NOW + 500) == ()


def test_reservations_that_can_not_all_be_kept_are_refused_in_one_line() -> None:
    first = SlotReservation(name="a", start_at=0, end_at=10, count=3, tenant="x")
    second = SlotReservation(name="b", start_at=5, end_at=15, count=3, tenant="y")
    assert too_many(first, [], mesh(4)) == ""
    problem = too_many(second, [first], mesh(4))
    assert problem == (
        "reservation b: 2 of its 3 slots are kept for a at the same time: reserve fewer, or another time"
    )
    assert too_many(second, [first], mesh(6)) == ""
    assert "the mesh has 2" in too_many(first, [], mesh(2))


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (asks("j", held="held by ann"), Cause.HELD),
        (asks("j", after=("gone",)), Cause.NEVER),
        (asks("j", after=("other",)), Cause.AFTER),
        (asks("j", array="sweep", array_limit=1), Cause.ARRAY),
        (asks("j", beside=("nobody",)), Cause.ROOM),
    ],
)
def test_what_keeps_a_job_back_beside_room(request_: JobRequest, cause: Cause) -> None:
    running = [runs(asks("r", array="sweep", array_limit=1), 0)]
    around = QueueSurroundings(table=mesh(), done={"gone": False, "ready": True})
    assert decide([waits(request_)], running, around, NOW).holds["j"].cause is cause
    assert started(decide([waits(asks("k", after=("ready",)))], running, around, NOW)) == {"k": 1}


def test_jobs_are_kept_apart_or_together() -> None:
    around, running = QueueSurroundings(table=mesh(8)), [runs(asks("r"), 0)]
    apart = decide([waits(asks("j", 2, apart=("r",)))], running, around, NOW).admissions[0]
    beside = decide([waits(asks("j", 2, beside=("r",)))], running, around, NOW).admissions[0]
    assert set(apart.slots) <= {"s4", "s5", "s6", "s7"}
    assert set(beside.slots) <= {"s1", "s2", "s3"}


def test_a_job_whose_deadline_is_near_goes_first() -> None:
    around = QueueSurroundings(table=mesh(1))
    queue = [waits(asks("a")), waits(asks("b", at=1, deadline=NOW + 1400))]
    assert started(decide(queue, [], around, NOW)) == {"b": 1}
    assert started(decide(queue, [], around, NOW - 5000)) == {"a": 1}


def test_a_job_parks_when_its_wall_time_is_over() -> None:
    around = QueueSurroundings(table=mesh(1))
    running = runs(asks("r", wall_time_s=3600.0), 0, ran_s=3600.0)
    (park,) = decide([], [running], around, NOW).parks
    assert park.held
    assert "wall time" in park.reason


def test_an_aged_job_comes_first_but_parks_nobody() -> None:
    rules = QueueRules(order=QueueOrder.PRIORITY, ageing_s=1000)
    around = QueueSurroundings(table=mesh(1), rules=rules)
    old, new = waits(asks("old")), waits(asks("new", at=NOW, priority=5))
    assert started(decide([old, new], [], around, NOW)) == {"old": 1}
    assert not decide([old], [runs(asks("r", priority=1), 0)], around, NOW).parks


def test_a_person_is_told_position_blocker_start_and_remedies() -> None:
    around = QueueSurroundings(table=mesh(4))
    running = [runs(asks("r", 3), 0, 1, 2, work_s=100)]
    queue = [waits(asks("large", 4), 50), waits(asks("next", 2, at=1), 200)]
    told = explain("next", queue, running, around, NOW)
    assert (told.position, told.of, told.blocker) == (2, 2, "large")
    assert told.starts_at == pytest.approx(NOW + 150)
    first = explain("large", queue, running, around, NOW)
    assert first.starts_at == pytest.approx(NOW + 100)
    assert first.remedies == ("replicas.min 1 instead of 4: it starts now",)


def test_a_prediction_that_would_take_too_long_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs of a hundred seconds before it, one at a time; three of their ends are looked at."""
    queue = [waits(asks(f"j{number}", at=number), 100.0) for number in range(5)]
    around, running = QueueSurroundings(table=mesh(1)), [runs(asks("r"), 0, work_s=100.0)]
    whole = explain("j4", queue, running, around, NOW)
    assert (whole.starts_at, whole.later_than) == (NOW + 500, None)
    monkeypatch.setattr(explanation, "MOST_LOOKS", 6 + 5 + 4)
    cut = explain("j4", queue, running, around, NOW)
    assert (cut.starts_at, cut.later_than) == (None, NOW + 200)


def test_cordoned_slots_get_nothing_new() -> None:
    table = SlotTable([MeshSlot(slot="s0", node="n", closed=True), MeshSlot(slot="s1", node="n")])
    decision = decide([waits(asks("j", 2, least=1))], [], QueueSurroundings(table=table), NOW)
    assert [admission.slots for admission in decision.admissions] == [("s1",)]


def test_replicas_out_of_order_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="min 3, want 2, max 4: give 1 ≤ min ≤ want ≤ max"):
        Replicas(least=3, want=2, most=4)
