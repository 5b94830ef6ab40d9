"""Another number of replicas, as people ask for it: what can't be is refused before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.membership.job_shape import JobShape
from schemas.errors import BadInput, Conflict
from schemas.job import FormerShape, JobState
from tests.builders.jobs import job, spec
from tests.job_context import job_context


def shape(state: JobState = JobState.RUNNING) -> tuple[JobShape, list[tuple[list[int], int]]]:
    """Of a job of two stages that the queue gives one to four replicas, and what its training is told."""
    told: list[tuple[list[int], int]] = []

    def scale(stages: Sequence[int], replicas: int) -> str:
        told.append((list(stages), replicas))
        return "grows"

    parallel = {"stages": 2, "replicas": {"min": 1, "want": 2, "max": 4}}
    instances = SimpleNamespace(units=())
    context = job_context(job("j", state, spec=spec(parallel=parallel)), instances=instances)
    return JobShape(context, scale, lambda: None), told


def test_a_person_may_ask_for_more_than_the_range_has_and_the_range_goes_along() -> None:
    wide, told = shape()
    assert wide.scale(None, 6) == "grows"
    assert wide.scale(1, 3) == "grows"
    assert told == [([0, 1], 6), ([1], 3)]


def test_a_range_that_would_be_too_wide_is_refused_before_anything_changes() -> None:
    wide, told = shape()
    with pytest.raises(
        BadInput, match=r"300 replicas: parallel\.replicas would be too wide: min 1 to max 300"
    ):
        wide.scale(None, 300)
    with pytest.raises(BadInput, match="job j has no unit tokenizer; those that make batches: none"):
        wide.scale(None, 2, "tokenizer")
    parked, _ = shape(JobState.PARKED)
    with pytest.raises(Conflict, match="job j is parked; only a running one can be scaled"):
        parked.scale(None, 2)
    assert told == []


async def test_what_a_person_wants_holds_for_the_shape_that_the_job_goes_back_to() -> None:
    parallel = {"replicas": {"min": 1, "want": 2, "max": 4}}
    record = job("j", JobState.RUNNING, spec=spec(parallel={"stages": 1, **parallel}))
    former = FormerShape(parallel=spec(parallel={"stages": 2, **parallel}).parallel)
    record = record.model_copy(update={"former_shape": former})
    noted: dict[str, Any] = {}

    async def note(*, now: bool, **figures: Any) -> None:
        noted.update(figures)

    store, instances = SimpleNamespace(record=record, note=note), SimpleNamespace(settle=lambda spec: None)
    context = job_context(record, store=store, instances=instances)
    await JobShape(context, lambda stages, replicas: "", lambda: None).prefer(3)
    for shape, stages in ((noted["spec"].parallel, 1), (noted["former_shape"].parallel, 2)):
        assert (shape.stages, shape.replica_range.want) == (stages, 3)
