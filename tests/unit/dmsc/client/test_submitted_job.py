"""The curve of a submitted job, as rows by step."""

from __future__ import annotations

from dmsc.client.submitted_job import COLUMNS, AsyncJob, LineDisplay
from schemas.curve import StepCurve, ValidationPoint
from tests.builders.jobs import job, spec, step_event


class Gateway:
    """Answers the one request that a curve needs."""

    async def curve(self, job: str, *, points: int) -> StepCurve:
        figures = dict.fromkeys(COLUMNS, (0.5, 0.25, 0.125))
        validations = (ValidationPoint(step=0, at=0.0, loss=9.0), ValidationPoint(step=2, at=1.0, loss=3.0))
        return StepCurve(job=job, next=9, steps=(0, 1, 2), validations=validations, **figures)


async def test_a_validation_stands_in_the_last_step_that_its_weights_have_seen() -> None:
    frame = await AsyncJob(Gateway(), job()).curve()  # type: ignore[arg-type]  # a curve needs no more
    assert list(frame.index) == [0, 1, 2]
    assert list(frame.loss) == [0.5, 0.25, 0.125]
    assert list(frame.validation_loss.dropna().items()) == [(1, 3.0)]


def test_the_number_of_steps_is_that_which_until_comes_to() -> None:
    said: list[str] = []
    training = {"until": {"epochs": 2}, "schedule": {"name": "constant"}}
    display = LineDisplay(job(spec=spec(training=training)), say=said.append)
    display.show(step_event(6, loss=0.5, total_steps=7))
    assert said == ["tiny-1 step 7/7 loss 0.5000"]
