"""Stages and replicas that a job file leaves to the planner."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from entities.orchestrator.planning.shape_choice import shape_request, with_shape
from entities.planner.planning_process import PlanningConfig
from schemas.errors import BadJob
from schemas.explain import explain
from schemas.job import JobSpec
from schemas.quota import asked_for
from tests.builders import graphs
from tests.builders.graphs import node
from tests.builders.jobs import spec
from tests.patience import PATIENCE_S

MODEL = graphs.topology(
    *(graphs.layer(at, forward_ms=5.0, backward_ms=10.0) for at in range(8)), tied=((2, 3),)
)


def job(**parallel: Any) -> JobSpec:
    return spec(parallel=parallel)


def test_a_job_counts_the_slots_that_it_may_use_until_its_shape_is_chosen() -> None:
    assert asked_for(job(stages="auto", slots=6)).slots == 6
    assert job(stages=4, replicas="auto", slots=6).parallel.replicas == (1, 2, 1, 2)
    again = JobSpec.model_validate(job(stages="auto", slots=6).model_dump(mode="json"))
    assert again == job(stages="auto", slots=6)


@pytest.mark.parametrize(
    ("parallel", "refusal"),
    [
        ({"stages": "auto"}, "stages: auto needs slots, the most that the job may use"),
        ({"stages": 2, "replicas": "auto"}, "replicas: auto needs slots"),
        ({"stages": "auto", "replicas": 2, "slots": 4}, "leave replicas out"),
        ({"stages": 5, "replicas": "auto", "slots": 4}, "slots: 4 are too few for 5 stages"),
        ({"stages": "auto", "slots": 4, "standbys": 1}, "leave standbys out"),
        ({"slots": 4}, "slots says how many the planner may use"),
        ({"stages": "auto", "slots": "many"}, "needs slots"),
        ({"stages": "some"}, "stages"),
    ],
)
def test_bad_words_are_refused_in_one_line(parallel: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValidationError) as refused:
        job(**parallel)
    (line,) = explain(refused.value, JobSpec)
    assert refusal in line
    assert "\n" not in line


async def test_the_planner_chooses_and_the_job_keeps_it() -> None:
    nodes = [node(name="n1", slots=3), node(name="n2", slots=3)]
    chosen, because = await with_shape(
        job(stages="auto", slots=4), MODEL, nodes, PlanningConfig(deadline_s=PATIENCE_S)
    )
    assert chosen.parallel.auto == ()
    assert chosen.parallel.slots is None
    assert 1 <= sum(chosen.parallel.replicas_per_stage()) <= 4
    assert JobSpec.model_validate(chosen.model_dump(mode="json")) == chosen
    assert because.startswith("parallel: auto chose ")
    assert "; not " in because
    kept, _ = await with_shape(
        job(stages=2, replicas="auto", slots=5), MODEL, nodes, PlanningConfig(deadline_s=PATIENCE_S)
    )
    assert kept.parallel.stages == 2


def test_the_request_has_the_fastest_slots_and_respects_ties() -> None:
    nodes = [node(name="n1", slots=3), node(name="n2", slots=3)]
    fast = [each.model_copy(update={"speed": {"stage": 2.0}}) for each in nodes[1].slots]
    request = shape_request(
        job(stages="auto", slots=4), MODEL, [nodes[0], nodes[1].model_copy(update={"slots": tuple(fast)})]
    )
    assert sorted(slot.speed for slot in request.slots) == [1.0, 2.0, 2.0, 2.0]
    assert 3 not in request.edges
    with pytest.raises(BadJob, match="no node of z has joined"):
        shape_request(job(stages="auto", slots=4, clusters=["z"]), MODEL, nodes)
