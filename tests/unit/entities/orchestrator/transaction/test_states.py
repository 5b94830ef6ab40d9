"""The tables of the step machine's states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from entities.orchestrator import transaction
from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.states import (
    STATE_VARIABLES,
    DispatchLifecycle,
    DispatchState,
    FencingLifecycle,
    FencingState,
    GroupLifecycle,
    GroupState,
    PhaseLifecycle,
    StateVariable,
    transitions,
)
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.errors import IllegalTransition
from schemas.step import PHASES, Member, Phase

PACKAGE = Path(transaction.__file__).parent
DATA, FIRST = Member(sid="j-data-r0", incarnation="i1"), Member(sid="j-s0-r0", incarnation="i1")


def test_the_named_transitions_of_the_phase_are_those_of_the_protocol() -> None:
    named = {phase: set[Phase]() for phase in Phase}
    for table in transitions(PhaseLifecycle).values():
        for phase, target in table.items():
            named[Phase(phase)].add(Phase(target))
    assert named == PHASES


@pytest.mark.parametrize("lifecycle", STATE_VARIABLES.values())
def test_each_transition_is_taken_by_its_name_and_says_when(lifecycle: type[StateVariable[Any]]) -> None:
    code = "".join(file.read_text("utf-8") for file in PACKAGE.glob("*.py") if file.name != "states.py")
    for name in transitions(lifecycle):
        assert re.search(rf"\.{name}\b", code), name
        assert getattr(lifecycle, name).__doc__


@pytest.mark.parametrize("lifecycle", STATE_VARIABLES.values())
def test_each_state_is_reached_from_the_first(lifecycle: type[StateVariable[Any]]) -> None:
    tables = transitions(lifecycle).values()
    states = list(type(next(iter(next(iter(tables))))))
    reached = {states[0]}
    for _ in states:
        reached |= {table[state] for table in tables for state in reached if state in table}
    assert reached == set(states)


def test_a_transition_leads_where_its_table_says() -> None:
    fencing = FencingLifecycle(FencingState.QUIET)
    for take, state in (
        (fencing.require_round, FencingState.DUE),
        (fencing.require_round, FencingState.DUE),
        (fencing.open_round, FencingState.OPEN),
        (fencing.require_round, FencingState.OPEN_AND_DUE),
        (fencing.close_round, FencingState.DUE),
    ):
        take()
        assert fencing.state is state


def test_one_that_is_not_in_the_table_is_refused_and_changes_nothing() -> None:
    dispatch = DispatchLifecycle(DispatchState.PENDING)
    with pytest.raises(IllegalTransition, match="renew_torn_dispatch is not legal while pending"):
        dispatch.renew_torn_dispatch()
    assert dispatch.state is DispatchState.PENDING
    group = GroupLifecycle(GroupState.FORMING)
    with pytest.raises(IllegalTransition, match="prepare is not legal while forming"):
        group.prepare()


def test_the_error_of_a_machine_has_the_history_of_the_step() -> None:
    machine = StepMachine(
        job="j",
        epoch=1,
        microbatches=1,
        clip_norm=None,
        stages=[(FIRST,)],
        data=[DATA],
        pauses=lambda step: False,
    )
    machine.decide(ev.Opened(3, 1), 0.0)
    with pytest.raises(
        IllegalTransition,
        match=r"step 3 of j: phase: open_step is not legal while gathering "
        r"\(history: 3/1 gathering\)",
    ):
        machine.decide(ev.Opened(3, 1), 0.0)
