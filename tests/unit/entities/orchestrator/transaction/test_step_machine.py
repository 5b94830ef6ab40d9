"""Single decisions of the step machine that a schedule of `tests/sim` would not show."""

from __future__ import annotations

import pytest

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.newcomers import LAST_LAG, LATE_REPORTS
from entities.orchestrator.transaction.stage_group import StageGroupConfig
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.step import Member
from tests.builders.steps import claim, vote

Edge = tuple[Member, Member]
PAUSE_S = StageGroupConfig().pause_s
FIRST, SECOND, DATA = (Member(sid=f"j-{unit}", incarnation="i1") for unit in ("s0-r0", "s0-r1", "data-r0"))


def opened(pause: int = -1) -> StepMachine:
    """Step 0 is open, and the group of the only stage, of two replicas, stands. Before step `pause` is a
    boundary."""
    machine = StepMachine(
        job="j",
        epoch=1,
        microbatches=2,
        clip_norm=None,
        stages=[(FIRST, SECOND)],
        data=[DATA],
        pauses=lambda step: step == pause,
    )
    machine.decide(ev.Opened(0, 0), 0.0)
    machine.decide(ev.Begun(0, 0), 0.0)
    machine.decide(ev.ReductionGroupFormed(0, 0), 0.0)
    return machine


def test_a_broken_group_counts_once_whoever_tells_of_it() -> None:
    machine = opened()
    assert machine.decide(ev.ReductionGroupFailed(0, 0), 1.0) == []
    assert machine.decide(ev.ReductionGroupFailed(0, 0), 1.1) == [], "the other member tells of the same one"
    (form,) = machine.decide(ev.Tick(), 1.0 + PAUSE_S)
    assert isinstance(form, ev.FormGroup)
    assert (form.generation, form.members) == (1, (FIRST, SECOND))
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 1), 2.0)
    assert isinstance(condemned, ev.Condemn), "with the same members it broke again"


@pytest.mark.parametrize("told", [((FIRST, SECOND), (SECOND, FIRST)), ((SECOND, FIRST), (FIRST, SECOND))])
def test_of_two_that_find_each_other_silent_it_is_always_the_same(told: tuple[Edge, Edge]) -> None:
    """Else a cut between two nodes costs one stage its member here, the next one its member there."""
    machine = opened()
    machine.decide(ev.ReductionGroupFailed(0, 0, told[:1]), 1.0)
    machine.decide(ev.Tick(), 1.0 + PAUSE_S)
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 1, told), 2.0)
    assert isinstance(condemned, ev.Condemn)
    assert condemned.member == SECOND


def test_who_is_silent_and_says_nothing_can_not_stay() -> None:
    machine = opened()
    machine.decide(ev.ReductionGroupFailed(0, 0), 1.0)
    machine.decide(ev.Tick(), 1.0 + PAUSE_S)
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 1, ((SECOND, FIRST),)), 2.0)
    assert isinstance(condemned, ev.Condemn)
    assert condemned.member == FIRST


def test_who_tells_of_it_is_not_taken_for_the_one_that_died() -> None:
    """A replacement is the last by name, and the first to notice that its peer has been killed."""
    machine = opened()
    machine.decide(ev.ReductionGroupFailed(0, 0, answered=(FIRST, SECOND)), 1.0)
    machine.decide(ev.Tick(), 1.0 + PAUSE_S)
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 1, answered=(SECOND,)), 2.0)
    assert isinstance(condemned, ev.Condemn)
    assert condemned.member == FIRST


def test_failures_before_a_step_that_was_decided_condemn_nobody_after_it() -> None:
    machine = opened()
    machine.decide(ev.ReductionGroupFailed(0, 0), 1.0)
    machine.decide(ev.Tick(), 1.0 + PAUSE_S)
    machine.decide(ev.ReductionGroupFormed(0, 1), 2.0)
    for microbatch in range(2):
        machine.decide(ev.Claimed(claim(microbatch, FIRST, step=0, upstream=DATA.sid)), 2.0)
    effects: list[ev.Effect] = []
    for member, microbatches in ((FIRST, (0, 1)), (SECOND, ())):
        ready = vote(member, generation=1, microbatches=microbatches)
        effects += machine.decide(ev.Voted(0, ready), 2.0)
    (record,) = effects
    assert isinstance(record, ev.Record)
    machine.decide(ev.DecisionRecorded(record.decision), 2.0)
    machine.decide(ev.Committed(0, ()), 2.0)
    assert machine.decide(ev.ReductionGroupFailed(0, 1), 100.0) == []
    (form,) = machine.decide(ev.Tick(), 101.0)
    assert isinstance(form, ev.FormGroup)
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 2), 102.0)
    assert isinstance(condemned, ev.Condemn)


def test_each_member_of_a_tied_stage_is_sent_the_sum_by_one() -> None:
    members = tuple(Member(sid=f"m{number}", incarnation="i1") for number in range(5))
    for own, others in ((1, 5), (2, 5), (5, 2)):
        prepare = ev.Prepare(0, 0, 0, 0, members[:own], ((3, members[:others]), (4, members[1:])))
        sent = [receivers for place in range(own) for receivers in prepare.receivers(place)]
        for stage, there in prepare.tied:
            assert sorted(m.sid for to, got in sent if to == stage for m in got) == [m.sid for m in there]


def test_a_boundary_before_the_first_step_is_like_any_other() -> None:
    """A validation may run there, which begins again when a member is lost, or when it stands still."""
    machine = StepMachine(
        job="j",
        epoch=1,
        microbatches=2,
        clip_norm=None,
        stages=[(FIRST, SECOND)],
        data=[DATA],
        pauses=lambda step: False,
        step=4,
        attempt=2,
        generation=7,
    )
    form, fence = machine.decide(ev.IncarnationLost(SECOND), 0.0)
    assert isinstance(form, ev.FormGroup)
    assert isinstance(fence, ev.Fence)
    assert (form.step, form.attempt, form.generation, form.members) == (4, 2, 8, (FIRST,))
    assert (fence.step, fence.attempt, fence.targets) == (4, 2, (DATA, FIRST))
    assert machine.stages == ((FIRST,),)
    (restart,) = machine.decide(ev.Stalled("validation: no progress"), 1.0)
    assert isinstance(restart, ev.Restart)
    assert restart.attempt == 3
    assert ev.Begin(4, 3) in machine.decide(ev.Opened(4, 3), 2.0)


# --- newcomers ------------------------------------------------------------------------------------------
NEWCOMER = Member(sid="j-s0-r2", incarnation="i1")


def arrived(machine: StepMachine) -> ev.SendState:
    (sending,) = machine.decide(ev.NewcomerReady(NEWCOMER, 0), 1.0)
    assert isinstance(sending, ev.SendState)
    return sending


def summed(machine: StepMachine) -> list[ev.Effect]:
    """The open step's microbatches are in the sums of the first two replicas."""
    effects: list[ev.Effect] = []
    for microbatch, owner in enumerate((FIRST, SECOND)):
        at = {"step": machine.step, "attempt": machine.attempt}
        told = claim(microbatch, owner, **at, upstream=DATA.sid, loss=1.0)
        effects += machine.decide(ev.Claimed(told), 1.0)
    return effects


def voted(machine: StepMachine, prepare: ev.Prepare) -> list[ev.Effect]:
    effects: list[ev.Effect] = []
    for number, member in enumerate(prepare.members):
        at = {"step": prepare.step, "attempt": prepare.attempt, "generation": prepare.generation}
        ready = vote(member, **at, microbatches=(number,) if number < 2 else ())
        effects += machine.decide(ev.Voted(0, ready), 1.0)
    return effects


def committed(machine: StepMachine, prepare: ev.Prepare) -> list[ev.Effect]:
    """The step is decided and applied; what is asked for at the opening of the next one."""
    (record,) = voted(machine, prepare)
    assert isinstance(record, ev.Record)
    machine.decide(ev.DecisionRecorded(record.decision), 1.0)
    machine.decide(ev.Begun(machine.step, machine.attempt), 1.0)
    return machine.decide(ev.Committed(record.decision.step), 1.0)


def prepared(effects: list[ev.Effect]) -> ev.Prepare:
    (prepare,) = effects
    assert isinstance(prepare, ev.Prepare)
    return prepare


def test_steps_are_committed_while_a_newcomer_follows() -> None:
    machine = opened()
    sending = arrived(machine)
    assert sending == ev.SendState(sending.source, NEWCOMER, 0, 1, follow=True)
    for step in range(3):
        prepare = prepared(summed(machine))
        assert (prepare.step, prepare.members) == (step, (FIRST, SECOND))
        assert committed(machine, prepare) == []


def test_another_layout_forms_the_group_anew_between_two_steps() -> None:
    machine = opened()
    assert machine.decide(ev.Relaid(0), 1.0) == []
    (form,) = committed(machine, prepared(summed(machine)))
    assert isinstance(form, ev.FormGroup)
    assert (form.generation, form.members) == (1, (FIRST, SECOND))
    assert summed(machine) == [], "the stage waits for its new group"
    prepare = prepared(machine.decide(ev.ReductionGroupFormed(0, 1), 1.0))
    assert prepare.generation == 1
    assert committed(machine, prepare) == []


def test_only_the_last_redo_holds_up_the_stage() -> None:
    machine = opened()
    sending = arrived(machine)
    committed(machine, prepared(summed(machine)))
    behind = machine.decide(ev.Followed(NEWCOMER, sending.transfer, 0), 1.0)
    assert behind == [ev.AwaitState(NEWCOMER, 1, sending.transfer)]
    assert summed(machine) == [], "the stage waits for the redo of step 0"
    (form,) = machine.decide(ev.Joined(NEWCOMER, sending.transfer, 1), 1.0)
    assert isinstance(form, ev.FormGroup)
    assert form.members == (FIRST, SECOND, NEWCOMER)
    prepare = prepared(machine.decide(ev.ReductionGroupFormed(0, form.generation), 1.0))
    assert prepare.members == form.members
    assert committed(machine, prepare) == []


def test_a_newcomer_that_catches_up_while_its_stage_prepares_joins_in_the_next_step() -> None:
    machine = opened()
    sending = arrived(machine)
    prepare = prepared(summed(machine))
    assert machine.decide(ev.Followed(NEWCOMER, sending.transfer, 0), 1.0) == []
    assert committed(machine, prepare) == [ev.AwaitState(NEWCOMER, 1, sending.transfer)]
    assert summed(machine) == []


def test_who_is_told_of_too_late_is_asked_again_and_sent_the_whole_state_in_the_end() -> None:
    machine = opened()
    first = arrived(machine)
    for asked in range(LATE_REPORTS):
        for _ in range(LAST_LAG + 1):
            committed(machine, prepared(summed(machine)))
        (again,) = machine.decide(ev.Followed(NEWCOMER, first.transfer, machine.step - LAST_LAG - 1), 1.0)
        assert isinstance(again, ev.SendState)
        last = asked == LATE_REPORTS - 1
        assert (again.follow, again.transfer) == ((False, 2) if last else (True, first.transfer))
        assert (summed(machine) == []) is last, "for the whole state the stage waits"
        if not last:
            machine = reopened(machine)


def reopened(machine: StepMachine) -> StepMachine:
    """The step whose microbatches are summed goes on to its end."""
    prepare = ev.Prepare(0, machine.step, machine.attempt, machine.generations[0], machine.stages[0])
    committed(machine, prepare)
    return machine


def test_who_cannot_keep_up_is_sent_the_whole_state_while_the_stage_waits() -> None:
    machine = opened()
    sending = arrived(machine)
    (whole,) = machine.decide(ev.Followed(NEWCOMER, sending.transfer, -1, slow=True), 1.0)
    assert isinstance(whole, ev.SendState)
    assert (whole.to, whole.version, whole.transfer, whole.follow) == (NEWCOMER, 0, 2, False)
    assert summed(machine) == []
    assert machine.decide(ev.Followed(NEWCOMER, sending.transfer, 0), 1.0) == [], "that one was given up"
    (form,) = machine.decide(ev.Joined(NEWCOMER, whole.transfer, 0), 1.0)
    assert isinstance(form, ev.FormGroup)
    assert NEWCOMER in form.members


def test_a_stage_does_not_wait_for_a_redo_whose_source_is_lost() -> None:
    machine = opened()
    sending = arrived(machine)
    machine.decide(ev.Followed(NEWCOMER, sending.transfer, 0), 1.0)
    effects = machine.decide(ev.IncarnationLost(sending.source), 1.0)
    (again,) = (one for one in effects if isinstance(one, ev.SendState))
    left = SECOND if sending.source == FIRST else FIRST
    assert again == ev.SendState(left, NEWCOMER, 0, 2, follow=True)
    assert machine.decide(ev.Joined(NEWCOMER, sending.transfer, 0), 1.0) == [], "what came may be of the lost"
    assert machine.decide(ev.JoinFailed(NEWCOMER, sending.transfer), 1.0) == []
    assert machine.newcomers == (NEWCOMER,)


def test_a_stage_waits_for_a_redo_once_and_then_for_the_whole_state() -> None:
    machine = opened()
    sending = arrived(machine)
    machine.decide(ev.Followed(NEWCOMER, sending.transfer, 0), 1.0)
    assert summed(machine) == []
    prepare = prepared(machine.decide(ev.JoinFailed(NEWCOMER, sending.transfer), 1.0))
    assert machine.newcomers == (NEWCOMER,), "a lost stage could be brought back with it"
    assert machine.decide(ev.NewcomerReady(NEWCOMER, 0), 1.0) == [], "not while the stage prepares"
    (whole,) = committed(machine, prepare)
    assert isinstance(whole, ev.SendState)
    assert (whole.version, whole.follow) == (1, False)


def test_a_newcomer_is_told_of_the_rounds_of_the_boundary_before_its_step() -> None:
    """Others put that number on their offers: one that does not know it would put them off for good."""
    machine = opened(pause=1)
    (boundary,) = committed(machine, prepared(summed(machine)))
    assert boundary == ev.Boundary(1)
    (fence,) = machine.decide(ev.NewcomerReady(Member(sid="j-data-r1", incarnation="i1"), -1), 1.0)
    assert isinstance(fence, ev.Fence)
    machine.decide(ev.FenceAcknowledged(fence.round, ()), 1.0)
    machine.decide(ev.Opened(1, 0), 1.0)
    sending = arrived(machine)
    machine.decide(ev.Followed(NEWCOMER, sending.transfer, 1), 1.0)
    (form,) = machine.decide(ev.Joined(NEWCOMER, sending.transfer, 1), 1.0)
    assert isinstance(form, ev.FormGroup)
    assert form.round == fence.round


def test_who_has_joined_does_not_arrive_again() -> None:
    machine = opened()
    sending = arrived(machine)
    machine.decide(ev.Followed(NEWCOMER, sending.transfer, 0), 1.0)
    machine.decide(ev.Joined(NEWCOMER, sending.transfer, 0), 1.0)
    assert machine.decide(ev.NewcomerReady(NEWCOMER, 0), 1.0) == []
    assert machine.newcomers == ()


def test_the_state_of_a_lost_newcomer_is_withdrawn() -> None:
    machine = opened()
    newcomer = NEWCOMER
    sending = arrived(machine)
    assert machine.decide(ev.IncarnationLost(newcomer), 1.1) == [ev.Withdraw(newcomer, sending.source, 0, 0)]
    assert machine.decide(ev.JoinFailed(newcomer, sending.transfer), 1.2) == []
