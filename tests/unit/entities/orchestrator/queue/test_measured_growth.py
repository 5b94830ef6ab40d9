"""What replicas bring a job is what its last growth has brought, once that was measured."""

from __future__ import annotations

import pytest

from entities.orchestrator.queue.mesh_slots import as_measured, job_request
from entities.queue.queued_job import JobRequest, Replicas
from schemas.changes import ChangeState, Forecast, JobChange
from schemas.job_file.parallel import ReplicaRange
from tests.builders import jobs

WITHIN = ReplicaRange(min=2, want=2, max=4)
FORECAST = (1.0, 1.5, 2.0)


def growth(before_s: float, after_s: float, state: ChangeState = ChangeState.BETTER) -> JobChange:
    return JobChange(
        kind="scale",
        replicas=(2, 3),
        step=9,
        by="orchestrator",
        forecast=Forecast.of(before_s, before_s / 1.5, cost_s=0.0, steps_left=100),
        state=state,
        before_s=before_s,
        after_s=after_s,
    )


def test_without_a_measured_growth_it_is_the_forecast() -> None:
    assert as_measured(FORECAST, WITHIN, ()) == FORECAST
    assert as_measured(FORECAST, WITHIN, (growth(0.6, 0.4, ChangeState.UNDONE),)) == FORECAST


def test_three_fifths_of_the_promise_are_three_fifths_of_each_further_one() -> None:
    speeds = as_measured(FORECAST, WITHIN, (growth(0.65, 0.5),))
    assert speeds == pytest.approx((1.0, 1.3, 1.6))


def test_growth_that_brought_nothing_is_the_last_one() -> None:
    speeds = as_measured(FORECAST, WITHIN, (growth(0.6, 0.6, ChangeState.NO_BETTER),))
    request = JobRequest(job="j", submitted_at=0.0, replicas=Replicas(least=2, want=2, most=4), speeds=speeds)
    assert request.larger(2, 0.1) is None


def test_replicas_that_were_given_to_others_since_say_nothing_about_growth() -> None:
    shrunk = growth(0.5, 0.6).model_copy(update={"replicas": (3, 2)})
    assert as_measured(FORECAST, WITHIN, (growth(0.65, 0.5), shrunk)) == pytest.approx((1.0, 1.3, 1.6))


def test_a_range_that_was_changed_since_is_not_corrected() -> None:
    narrow = ReplicaRange(min=3, want=3, max=4)
    assert as_measured((1.0, 1.3), narrow, (growth(0.6, 0.6),)) == (1.0, 1.3)


def test_speeds_stay_relative_to_what_the_job_wants() -> None:
    wide = ReplicaRange(min=1, want=3, max=4)
    speeds = as_measured((0.4, 0.7, 1.0, 1.3), wide, (growth(0.6, 0.6),))
    assert speeds[2] == 1.0
    assert speeds[1:] == pytest.approx((1.0, 1.0, 1.0))
    assert speeds[0] == pytest.approx(0.4 / 0.7)


@pytest.mark.parametrize(
    ("automation", "most"),
    [
        ({}, 4),
        ({"objective": "cost"}, 2),
        ({"budget": {"energy": 1e6}}, 2),
        ({"budget": {"time": 3600.0}}, 4),
    ],
)
def test_a_job_for_another_objective_than_time_starts_with_no_more_than_it_wants(
    automation: dict[str, object], most: int
) -> None:
    parallel = {"stages": 2, "replicas": {"min": 1, "want": 2, "max": 4}}
    spec = jobs.spec(parallel=parallel, automation=automation)
    request = job_request(jobs.job("j", spec=spec), spec)
    assert request.replicas == Replicas(least=1, want=2, most=most)
    assert len(request.speeds) == most
