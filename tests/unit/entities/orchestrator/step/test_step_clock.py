"""What a step's time went to: phases that follow each other, whatever was marked."""

from __future__ import annotations

import pytest

from entities.orchestrator.step import step_loop
from entities.orchestrator.step.step_loop import StepClock


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(step_loop, "time", found)
    return found


def test_phases_follow_each_other_and_the_last_stage_counts(clock: Clock) -> None:
    steps = StepClock()
    steps.begin()
    for now, mark in ((1.0, "begun"), (3.0, "prepare"), (4.0, "prepare"), (7.0, "record")):
        clock.now = now
        steps.mark(mark)
    clock.now = 7.5
    phases = steps.phases()
    assert phases is not None
    assert phases.model_dump() == {"begin_s": 1.0, "claims_s": 3.0, "prepare_s": 3.0, "decide_s": 0.5}


def test_another_attempt_begins_anew_and_what_was_not_marked_took_no_time(clock: Clock) -> None:
    steps = StepClock()
    assert steps.phases() is None, "taken over from another orchestrator"
    steps.begin()
    steps.mark("prepare")
    clock.now = 2.0
    steps.begin()
    clock.now = 5.0
    phases = steps.phases()
    assert phases is not None
    assert phases.model_dump() == {"begin_s": 3.0, "claims_s": 0.0, "prepare_s": 0.0, "decide_s": 0.0}
