"""The objective of a trial from its curve, and the order of a sweep's table."""

from __future__ import annotations

from typing import Any

import pytest

from dmsc.sweeps.results import last_objective, objective_at, reported, result_of, result_table
from dmsc.sweeps.sweep_file import Objective
from dmsc.sweeps.trials import SweepTrial
from schemas.curve import StepCurve, ValidationPoint
from schemas.job import JobState
from tests.builders.jobs import job, spec


def curve(steps: range, **validations: Any) -> StepCurve:
    points = tuple(
        ValidationPoint(step=step, at=0.0, loss=10.0 - step, metrics={"accuracy": step / 100})
        for step in validations.get("at", ())
    )
    return StepCurve(
        job="j", next=1, steps=tuple(steps), loss=tuple(float(step) for step in steps), validations=points
    )


@pytest.mark.parametrize(
    ("objective", "step", "value"),
    [
        (Objective(), 4, 6.0),
        (Objective(), 5, None),
        (Objective(metric="accuracy"), 8, 0.08),
        (Objective(metric="loss"), 6, 5.0),
        (Objective(metric="loss", last_steps=3), 6, 4.0),
        (Objective(metric="loss"), 11, None),
    ],
)
def test_an_objective_at_a_rung(objective: Objective, step: int, value: float | None) -> None:
    assert objective_at(curve(range(10), at=(4, 8)), step, objective) == value


def test_a_thinned_curve_has_the_loss_before() -> None:
    assert objective_at(curve(range(0, 40, 8)), 13, Objective(metric="loss")) == 8.0


def test_the_last_one_and_what_there_is() -> None:
    found = curve(range(10), at=(4, 8))
    assert last_objective(found, Objective()) == 2.0
    assert last_objective(found, Objective(metric="speed")) is None
    assert last_objective(curve(range(0)), Objective(metric="loss")) is None
    assert reported([found]) == ["loss", "validation_loss", "accuracy"]


def test_what_is_done_goes_before_what_was_left_out_early() -> None:
    trials = [SweepTrial(number=number, values={"lr": number}, spec=spec()) for number in range(4)]
    states = (JobState.CANCELLED, JobState.DONE, JobState.DONE, JobState.FAILED)
    records = {number: job(f"j{number}", state) for number, state in enumerate(states)}
    curves = {0: curve(range(9), at=(9,)), 1: curve(range(4), at=(4,)), 2: curve(range(8), at=(8,))}
    result = result_of("s", "d", Objective(), trials, records, curves)
    assert [row.trial for row in result.trials] == [2, 1, 0, 3]
    assert result.best == 2
    columns, rows = result_table(result)
    assert columns == ("trial", "job", "state", "step", "lr", "validation_loss")
    assert (rows[0][-1], rows[3][-1]) == ("2*", "–")
