"""Single decisions of the step machine that a schedule of `tests/sim` would not show."""

from __future__ import annotations

import pytest

from entities.orchestrator import step_events as ev
from entities.orchestrator.stage_group import REFORM_S
from entities.orchestrator.step_machine import StepMachine
from schemas.step import Member

Edge = tuple[Member, Member]
FIRST, SECOND, DATA = (Member(sid=f"j-{unit}", incarnation="i1") for unit in ("s0-r0", "s0-r1", "data-r0"))


def opened() -> StepMachine:
    """Step 0 is open, and the group of the only stage, of two replicas, stands."""
    machine = StepMachine(
        job="j", epoch=1, microbatches=2, clip_norm=None, stages=[(FIRST, SECOND)], data=[DATA],
        pauses=lambda step: False,
    )  # fmt: skip
    machine.decide(ev.Opened(0, 0), 0.0)
    machine.decide(ev.Begun(0, 0), 0.0)
    machine.decide(ev.GroupFormed(0, 0), 0.0)
    return machine


def test_a_broken_group_counts_once_whoever_tells_of_it() -> None:
    machine = opened()
    assert machine.decide(ev.GroupFailed(0, 0), 1.0) == []
    assert machine.decide(ev.GroupFailed(0, 0), 1.1) == [], "the other member tells of the same one"
    (form,) = machine.decide(ev.Tick(), 1.0 + REFORM_S)
    assert isinstance(form, ev.FormGroup)
    assert (form.generation, form.members) == (1, (FIRST, SECOND))
    (condemned,) = machine.decide(ev.GroupFailed(0, 1), 2.0)
    assert isinstance(condemned, ev.Condemn), "with the same members it broke again"


@pytest.mark.parametrize("told", [((FIRST, SECOND), (SECOND, FIRST)), ((SECOND, FIRST), (FIRST, SECOND))])
def test_of_two_that_find_each_other_silent_it_is_always_the_same(told: tuple[Edge, Edge]) -> None:
    """Else a cut between two nodes costs one stage its member here, the next one its member there."""
    machine = opened()
    machine.decide(ev.GroupFailed(0, 0, told[:1]), 1.0)
    machine.decide(ev.Tick(), 1.0 + REFORM_S)
    (condemned,) = machine.decide(ev.GroupFailed(0, 1, told), 2.0)
    assert isinstance(condemned, ev.Condemn)
    assert condemned.member == SECOND


def test_who_is_silent_and_says_nothing_can_not_stay() -> None:
    machine = opened()
    machine.decide(ev.GroupFailed(0, 0), 1.0)
    machine.decide(ev.Tick(), 1.0 + REFORM_S)
    (condemned,) = machine.decide(ev.GroupFailed(0, 1, ((SECOND, FIRST),)), 2.0)
    assert isinstance(condemned, ev.Condemn)
    assert condemned.member == FIRST


def test_the_state_of_a_lost_newcomer_is_withdrawn() -> None:
    machine = opened()
    newcomer = Member(sid="j-s0-r2", incarnation="i1")
    (sending,) = machine.decide(ev.Arrived(newcomer, 0), 1.0)
    assert isinstance(sending, ev.SendState)
    assert machine.decide(ev.Lost(newcomer), 1.1) == [ev.Withdraw(newcomer, sending.source, 0, 0)]
    assert machine.decide(ev.JoinFailed(newcomer), 1.2) == []
