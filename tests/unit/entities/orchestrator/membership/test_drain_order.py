"""Which instances may leave their node, and when."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.membership.drain_order import DrainOrder
from schemas.step import Member
from schemas.task_graph import TaskUnit
from tests.builders.graphs import graph, unit
from tests.job_context import job_context

DATA, LONELY, LEFT, RIGHT = (
    Member(sid=sid, incarnation="i") for sid in ("j-data-r0", "j-s0-r0", "j-s1-r0", "j-s1-r1")
)
STAGES = ((LONELY,), (LEFT, RIGHT))


class Place:
    """Instances and rooms as far as a hand-over looks at them."""

    def __init__(self) -> None:
        self.members = {member.sid: member for member in (DATA, LONELY, LEFT, RIGHT)}
        self.graph = graph(*map(unit, self.members))
        self.lost: set[Member] = set()
        self.full = ""
        self.lifted = False
        self.dropped: list[str] = []

    def stay(self, sid: str) -> None:
        """It migrates no more."""

    @property
    def units(self) -> tuple[TaskUnit, ...]:
        return self.graph.units

    def may_stay(self, unit: TaskUnit) -> bool:
        return self.lifted

    def no_room(self, units: list[TaskUnit]) -> str:
        return self.full


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def hand_over(place: Place) -> DrainOrder:
    both: Any = place
    return DrainOrder(job_context(instances=both), both, place.dropped.append)


def test_one_with_a_replica_goes_without_a_rest_and_the_others_wait_for_one(hand_over: DrainOrder) -> None:
    assert hand_over.ask(LEFT.sid, STAGES, ()) == ""
    assert not hand_over.waits(STAGES)
    for member in (DATA, LONELY):
        assert hand_over.ask(member.sid, STAGES, ()) == ""
    assert hand_over.waits(STAGES)
    assert hand_over.next(STAGES, (), at_rest=False) == LEFT
    assert hand_over.next(STAGES, (), at_rest=False) is None
    assert [hand_over.next(STAGES, (), at_rest=True) for _ in range(3)] == [DATA, LONELY, None]
    assert not hand_over.waits(STAGES)


def test_one_after_the_other(hand_over: DrainOrder, place: Place) -> None:
    assert hand_over.ask(LEFT.sid, STAGES, {DATA.sid}) == f"{DATA.sid} must be back first"
    assert hand_over.ask(LEFT.sid, ((LONELY,), (LEFT,)), ()) == f"{RIGHT.sid} must have joined first"
    place.lost.add(LEFT)
    assert hand_over.ask(LEFT.sid, STAGES, ()) == "it is being replaced"
    place.full = "needs 1 slots, 0 of 2 free"
    assert hand_over.ask(RIGHT.sid, STAGES, ()) == place.full


def test_what_changed_since_it_was_asked_for_counts(hand_over: DrainOrder, place: Place) -> None:
    assert hand_over.ask(LEFT.sid, STAGES, ()) == ""
    assert place.dropped == []
    assert hand_over.next(STAGES, {RIGHT.sid}, at_rest=False) is None, "the drain asks again"
    assert place.dropped == [LEFT.sid]
    assert hand_over.ask(LEFT.sid, STAGES, ()) == ""
    place.lifted = True
    assert hand_over.next(STAGES, (), at_rest=False) is None, "nobody wants it to go any more"
