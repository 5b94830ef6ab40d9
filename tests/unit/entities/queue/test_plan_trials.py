"""Jobs for which counts of slots say too little: they start, displace others and are waited for by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from entities.queue.decision import Cause
from entities.queue.explanation import explain
from entities.queue.plan_trials import TrialLater
from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from entities.queue.reservations import SlotReservation
from entities.queue.scheduling import QueueSurroundings, decide
from tests.unit.entities.queue.test_scheduling import NOW, asks, mesh, runs, started, waits

PRIORITY = QueueRules(order=QueueOrder.PRIORITY)


class TwoOnOneNode:
    """A plan needs two slots of one node: `s0` and `s1`, `s2` and `s3`, …"""

    why = "no node has two slots"
    searching = False

    def __init__(self, most: int = 100) -> None:
        self.tried: list[tuple[str, ...]] = []
        self.most = most

    def __call__(self, replicas: int, slots: Sequence[str], *, search: bool = False) -> Sequence[str] | None:
        if len(self.tried) >= self.most:
            raise TrialLater
        self.tried.append(tuple(slots))
        for first in range(0, 8, 2):
            if {f"s{first}", f"s{first + 1}"} <= set(slots):
                return [f"s{first}", f"s{first + 1}"]
        return None


def around(count: int = 4, rules: QueueRules = PRIORITY, **more: object) -> QueueSurroundings:
    table = mesh(count, nodes=count // 2)
    return replace(QueueSurroundings(table=table, rules=rules, trials={"pair": TwoOnOneNode()}), **more)


def test_victims_are_chosen_by_trying_the_plan() -> None:
    """Kueue's issue 10815: a preemption that frees slots which the plan can't use. Only two of three that are
    cheaper than the last one help."""
    running = [runs(asks(f"r{slot}", priority=place), slot) for place, slot in enumerate((0, 2, 3, 1))]
    decision = decide([waits(asks("pair", 2, priority=9))], running, around(), NOW)
    assert sorted(park.job for park in decision.parks) == ["r2", "r3"]
    assert decision.holds["pair"].cause is Cause.LEAVERS


def test_one_victim_is_enough_beside_a_free_slot_of_the_right_node() -> None:
    """The count is right from the start, and nobody parks on the node that helps least."""
    running = [runs(asks("r0", priority=1), 0), runs(asks("r3", priority=0), 3)]
    decision = decide([waits(asks("pair", 2, priority=9))], running, around(), NOW)
    assert [park.job for park in decision.parks] == ["r3"]
    leaving = replace(running[1], parks_at=NOW + 30)
    again = decide(
        [waits(asks("pair", 2, priority=9)), waits(asks("one"))], [running[0], leaving], around(), NOW + 1
    )
    assert not again.parks
    assert again.holds["pair"].cause is Cause.LEAVERS
    assert [admission.slots for admission in again.admissions] == [("s1",)], "s2 is kept for the pair"


def test_who_shrinks_is_chosen_by_the_plan() -> None:
    """The one that gives up first by its size has nothing of use, and a needless replica stays."""
    wide = runs(asks("wide", 2, least=1, most=4), 0, 2, 4, started_at=0.0)
    other = runs(asks("other", 2, least=1, most=2), 6, 7)
    rest = [runs(asks("fixed", 1), 1, fixed=True)]
    decision = decide([waits(asks("pair", 2))], [wide, other, *rest], around(8), NOW)
    (resize,) = decision.resizes
    assert (resize.job, resize.leaves) == ("wide", ("s4",))


def test_a_job_without_a_plan_on_free_slots_holds_back_only_who_would_take_the_slots_of_its_plan() -> None:
    """Two slots are free, on two nodes. Its plan is that of the earliest end: on `s0` and `s1`."""
    running = [runs(asks("r0"), 0, work_s=500), runs(asks("r2"), 2, work_s=900)]
    queue = [waits(asks("pair", 2)), waits(asks("long", at=1), 9e9), waits(asks("more", at=2), 9e9)]
    decision = decide(queue, running, around(), NOW)
    hold = decision.holds["pair"]
    assert (hold.cause, hold.expected_at) == (Cause.PLAN, NOW + 500)
    assert hold.reason == "no plan with the free slots: no node has two slots"
    assert [(each.job, each.slots) for each in decision.admissions] == [("long", ("s3",))]
    assert decision.holds["more"].blocker == "pair"
    short = decide([queue[0], waits(asks("short", at=1), 400)], running, around(), NOW)
    assert started(short) == {"short": 1}


def test_what_such_a_job_lacks_is_said_of_the_free_slots() -> None:
    """Too few are free to try a plan on them; what others leave was tried, and is no reason to wait."""
    running = [runs(asks(f"r{slot}"), slot, work_s=100 * (slot + 1)) for slot in (0, 1, 2)]
    trial = TwoOnOneNode()
    trial.why = ""
    decision = decide([waits(asks("pair", 2))], running, around(trials={"pair": trial}), NOW)
    hold = decision.holds["pair"]
    assert hold.reason == "needs 2 slots, 1 of 4 free: waiting for a job to end or a node to join"
    assert (hold.cause, hold.expected_at) == (Cause.PLAN, NOW + 200)


def test_jobs_are_asked_in_turn_to_shrink_for_a_plan() -> None:
    """As for others: who has most of what it wants is next. Nobody gives up three where two would do."""
    running = [
        runs(asks("first", 4, least=1), 0, 4, 2, 5, started_at=0.0),
        runs(asks("second", 4, least=1), 1, 3, 6, 7, started_at=0.0),
    ]
    (resize,) = decide([waits(asks("pair", 2))], running, around(8), NOW).resizes
    assert (resize.job, sorted(resize.leaves)) == ("second", ["s6", "s7"])


@pytest.mark.parametrize("backfill", [Backfill.NONE, Backfill.ANY])
def test_under_other_rules_a_job_without_a_plan_is_a_head_like_others(backfill: Backfill) -> None:
    running = [runs(asks("r0"), 0), runs(asks("r2"), 2)]
    queue = [waits(asks("pair", 2)), waits(asks("one", at=1), 9e9)]
    decision = decide(queue, running, around(rules=QueueRules(backfill=backfill)), NOW)
    assert started(decision) == ({} if backfill is Backfill.NONE else {"one": 1})


class Nowhere(TwoOnOneNode):
    def __call__(self, replicas: int, slots: Sequence[str], *, search: bool = False) -> Sequence[str] | None:
        self.tried.append(tuple(slots))
        return None


def test_a_job_that_no_slots_of_the_mesh_can_have_keeps_nothing_from_others() -> None:
    trial = Nowhere()
    nowhere = around(trials={"pair": trial})
    queue = [waits(asks("pair", 2, priority=9)), waits(asks("one"), 9e9)]
    running = [runs(asks("r0"), 0)]
    decision = decide(queue, running, nowhere, NOW)
    assert started(decision) == {"one": 1}
    assert decision.holds["pair"].cause is Cause.NEVER
    assert decision.holds["pair"].reason == "no plan on this mesh, others go first: no node has two slots"
    assert not decision.parks
    assert len(trial.tried) == 3, "on what is free, with all that parks, and with all that comes free"
    window = SlotReservation(name="w", start_at=0, end_at=2e9, count=1)
    kept = decide(queue, running, replace(nowhere, reservations=(window,)), NOW)
    assert kept.holds["pair"].cause is Cause.PLAN, "it may have one when the reservation ends"


def test_while_a_plan_is_searched_nobody_parks_for_the_job() -> None:
    running = [runs(asks("r0", priority=1), 0), runs(asks("r3", priority=0), 3)]
    trial = TwoOnOneNode()
    trial.searching = True
    decision = decide([waits(asks("pair", 2, priority=9))], running, around(trials={"pair": trial}), NOW)
    assert not decision.parks
    assert decision.holds["pair"].cause is Cause.PLAN


def test_what_was_not_tried_yet_is_tried_in_the_next_decision() -> None:
    running = [runs(asks("r0", priority=1), 0), runs(asks("r3", priority=0), 3)]
    few = replace(around(), trials={"pair": TwoOnOneNode(most=1)})
    decision = decide([waits(asks("pair", 2, priority=9)), waits(asks("one"))], running, few, NOW)
    assert decision.holds["pair"].cause is Cause.PLAN
    assert decision.next_at == NOW + 1
    assert started(decision) == {"one": 1}
    assert not decision.parks


def test_the_expected_start_of_such_a_job_is_that_of_its_plan() -> None:
    """Nobody plans in virtual time, where both slots would do."""
    running = [runs(asks("r0"), 0, work_s=500), runs(asks("r2"), 2, work_s=900)]
    told = explain("pair", [waits(asks("pair", 2))], running, around(), NOW)
    assert (told.cause, told.starts_at) == (Cause.PLAN, NOW + 500)
