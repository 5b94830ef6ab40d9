"""A job's figures for metrics."""

from __future__ import annotations

import pytest

from entities.orchestrator.monitoring.job_figures import JobFigures, slope_of
from schemas.job import JobRecord, StepResult
from schemas.task_graph import TaskGraph
from tests.builders.graphs import graph, placement, unit
from tests.builders.jobs import job, spec, step_result

SPEC = spec(data={"sample_tokens": 10}, training={"steps": 100, "microbatches": 2, "microbatch_samples": 5})


def record(step: int, graph: TaskGraph | None = None) -> JobRecord:
    return job("j", spec=SPEC, step=step, graph=graph, recoveries=2)


def result(step: int, loss: float) -> StepResult:
    return step_result(step, loss=loss, gradient_norm=0.5, step_s=0.1)


def values(figures: JobFigures, held: JobRecord, peak_tflops: float | None = None) -> dict[str, float]:
    return {reading.metric.name: reading.value for reading in figures.readings(held, peak_tflops)}


def test_before_the_first_step_there_is_what_the_record_says() -> None:
    assert values(JobFigures(), record(7)) == {
        "dmsc_job_step": 7,
        "dmsc_job_tokens_total": 700,
        "dmsc_job_recoveries_total": 2,
    }


def test_convergence_is_the_fall_of_the_loss_per_million_tokens() -> None:
    figures = JobFigures()
    for step in range(60):
        figures.decided(result(step, 5.0 - 0.01 * step))
    found = values(figures, record(60))
    assert found["dmsc_job_loss_decrease_per_million_tokens"] == pytest.approx(0.01 / 100 * 1e6)
    assert found["dmsc_job_loss"] == pytest.approx(4.41)
    assert found["dmsc_job_gradient_norm"] == 0.5
    assert slope_of([(1.0, 2.0), (1.0, 3.0)]) is None


def test_mfu_only_where_the_peak_is_told() -> None:
    """Model FLOP/s by 6 N; the peak counts each device of the stages once, data instances' none."""
    devices = {"j-data-r0": "cpu", "j-s0-r0": "cuda:0", "j-s1-r0": "cuda:0", "j-s2-r0": "cuda:1"}
    places = tuple(placement(sid, slot, device=device) for slot, (sid, device) in enumerate(devices.items()))
    plan = graph(*map(unit, devices), placements=places, parameters=1_000_000)
    figures = JobFigures()
    figures.decided(result(0, 5.0))
    assert "dmsc_job_mfu_ratio" not in values(figures, record(1, plan))
    found = values(figures, record(1, plan), peak_tflops=0.1)
    assert found["dmsc_job_model_flops_per_second"] == 6e9
    assert found["dmsc_job_mfu_ratio"] == pytest.approx(6e9 / 2e11)
