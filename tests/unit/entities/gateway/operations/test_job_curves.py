"""A curve folded from events: roll-backs replace, long curves thin to steps that all jobs share."""

from __future__ import annotations

from entities.gateway.operations.job_curves import CurveFold
from schemas.job import JobEvent
from tests.builders.jobs import step_event


def validation(step: int, loss: float) -> JobEvent:
    return JobEvent(job="j", kind="validation", at=0.0, validation_step=step, validation_loss=loss)


def folded(events: list[JobEvent], **options: int) -> CurveFold:
    fold = CurveFold("j", **options)
    for sequence, event in enumerate(events, start=1):
        fold.add(sequence, event)
    return fold


def test_a_step_that_is_taken_again_replaces_itself_and_what_came_after() -> None:
    events = [step_event(step, loss=float(step)) for step in range(4)]
    events += [validation(4, 9.0), JobEvent(job="j", kind="recovery", at=5.0, text="all back to step 2")]
    events += [step_event(2, loss=20.0), step_event(3, loss=30.0), validation(4, 8.0)]
    curve = folded(events).curve()
    assert curve.steps == (0, 1, 2, 3)
    assert curve.loss == (0.0, 1.0, 20.0, 30.0)
    assert [(point.step, point.loss) for point in curve.validations] == [(4, 8.0)]
    assert [(note.step, note.kind) for note in curve.interruptions] == [(3, "recovery")]


def test_it_goes_on_where_an_earlier_answer_ended() -> None:
    fold = folded([step_event(step) for step in range(3)])
    first = fold.curve()
    fold.add(9, step_event(3))
    assert fold.curve(start=first.next).steps == (3,)


def test_a_long_curve_keeps_steps_that_every_job_keeps_and_the_last() -> None:
    for length in (100, 118):
        curve = folded([step_event(step) for step in range(length)], kept_points=40).curve()
        assert curve.stride == 4
        assert curve.steps == (*range(0, length - 1, 4), length - 1)
    coarse = folded([step_event(step) for step in range(100)]).curve(most=10)
    assert (coarse.stride, coarse.steps) == (16, (0, 16, 32, 48, 64, 80, 96, 99))


def test_a_resumed_job_begins_late() -> None:
    assert folded([step_event(50)]).curve().first_kept == 50
    assert folded([]).curve().steps == ()


def test_of_many_validations_every_second_stays_and_the_last() -> None:
    curve = folded([validation(step, float(step)) for step in range(21)], kept_points=20).curve()
    assert [point.step for point in curve.validations] == list(range(0, 21, 2))
