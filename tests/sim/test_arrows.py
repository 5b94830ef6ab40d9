"""Each transition that the step machine's tables allow is taken: in schedules, or by a case of its own."""

from __future__ import annotations

import os
import random

import pytest

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.step import Member, MicrobatchClaim, StepVote
from tests.sim.answers import JOB, Answers
from tests.sim.arrows import Arrow, all_arrows, counted_arrows

SCHEDULES = int(os.environ.get("DMSC_SIM_SCHEDULES", "200"))
"""With seeds 0, 1, …; more than `KNOWN` are drawn anew each time. `DMSC_SIM_SEED=N` runs that one alone."""
KNOWN = 200
A, B, C, D, DATA = (Member(sid=name, incarnation="i1") for name in ("a", "b", "c", "d", "data"))


def gathering(*stages: tuple[Member, ...]) -> StepMachine:
    """Step 0 is open and dispatched, and each group is formed."""
    machine = StepMachine(
        job=JOB,
        epoch=1,
        microbatches=1,
        clip_norm=None,
        stages=stages,
        data=[DATA],
        pauses=lambda step: False,
    )
    machine.decide(ev.Opened(0, 0), 0.0)
    machine.decide(ev.Begun(0, 0), 0.0)
    for stage in range(len(stages)):
        machine.decide(ev.ReductionGroupFormed(stage, 0), 0.0)
    return machine


def restarting(*stages: tuple[Member, ...]) -> StepMachine:
    machine = gathering(*stages)
    machine.decide(ev.Stalled("no progress"), 0.0)
    return machine


def begun_twice() -> None:
    gathering((A,)).decide(ev.Begun(0, 0), 1.0)


def late_report_of_a_second_failure() -> None:
    """The failure comes after the group has been formed, but before its stage prepares."""
    machine = gathering((A, B))
    machine.decide(ev.ReductionGroupFailed(0, 0), 1.0)
    machine.decide(ev.Tick(), 2.0)
    machine.decide(ev.ReductionGroupFormed(0, 1), 2.0)
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 1), 3.0)
    assert isinstance(condemned, ev.Condemn)


def all_of_a_condemned_group_lost_at_once() -> None:
    """It fails twice while the step is committed, and then nobody answers the commit."""
    machine = gathering((A, B))
    claim = MicrobatchClaim(
        job=JOB, epoch=1, step=0, attempt=0, microbatch=0, stage=0, owner=A, upstream=DATA.sid
    )
    machine.decide(ev.Claimed(claim), 2.0)
    effects: list[ev.Effect] = []
    for member, microbatches in ((A, (0,)), (B, ())):
        vote = StepVote(
            member=member,
            step=0,
            attempt=0,
            generation=0,
            microbatches=microbatches,
            checksum="c",
            squared_norms=(1.0,),
        )
        effects += machine.decide(ev.Voted(0, vote), 2.0)
    (record,) = effects
    assert isinstance(record, ev.Record)
    machine.decide(ev.DecisionRecorded(record.decision), 2.0)
    machine.decide(ev.ReductionGroupFailed(0, 0), 3.0)
    machine.decide(ev.Tick(), 4.0)
    (condemned,) = machine.decide(ev.ReductionGroupFailed(0, 1), 5.0)
    assert isinstance(condemned, ev.Condemn)
    assert ev.StageLost(0, 1) in machine.decide(ev.Committed(0, (A, B)), 5.0)


def brought_back_in_vain_twice() -> None:
    """The member that was to bring the stage back is lost while a restart is under way."""
    machine = restarting((A,), (B,))
    for member in (A, C):
        machine.decide(ev.IncarnationLost(member), 1.0)
    assert machine.decide(ev.Restored(0, (C,)), 1.0) == []
    assert machine.decide(ev.Restored(0, (C,)), 1.0) == []
    assert any(isinstance(effect, ev.StageLost) for effect in machine.decide(ev.Restarted(1), 2.0))


def brought_back_in_vain_and_then_for_good() -> None:
    machine = restarting((A,), (B,))
    for member in (A, C):
        machine.decide(ev.IncarnationLost(member), 1.0)
    machine.decide(ev.Restored(0, (C,)), 1.0)
    assert machine.decide(ev.Restored(0, (D,)), 1.0) == []
    assert not any(isinstance(effect, ev.StageLost) for effect in machine.decide(ev.Restarted(1), 2.0))


CASES = {
    ("dispatch", "finish_dispatch", "dispatched"): begun_twice,
    ("reduction group", "condemn", "formed"): late_report_of_a_second_failure,
    ("reduction group", "vacate", "condemned"): all_of_a_condemned_group_lost_at_once,
    ("reduction group", "vacate", "vacant"): brought_back_in_vain_twice,
    ("reduction group", "forget_report", "vacant"): brought_back_in_vain_twice,
    ("reduction group", "form", "vacant"): brought_back_in_vain_and_then_for_good,
}
"""Transitions that are too seldom for schedules, and what takes them."""


@pytest.mark.parametrize("arrow", CASES, ids=" ".join)
def test_a_seldom_transition_is_taken(arrow: Arrow) -> None:
    with counted_arrows() as taken:
        CASES[arrow]()
    assert taken[arrow]


def test_whatever_order_answers_come_in_each_transition_is_legal_and_taken() -> None:
    """An illegal one raises; a state or a transition that no schedule needs would be found here, too."""
    fixed = os.environ.get("DMSC_SIM_SEED")
    seeds = [*range(min(SCHEDULES, KNOWN)), *(random.randrange(1 << 32) for _ in range(SCHEDULES - KNOWN))]
    with counted_arrows() as taken:
        for seed in [int(fixed)] if fixed else seeds:
            try:
                Answers(seed).run()
            except Exception as error:
                pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    if not fixed:
        assert all_arrows() - set(taken) - set(CASES) == set()
