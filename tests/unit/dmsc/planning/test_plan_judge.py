"""The simulator as judge of plans (ADR-0077)."""

from __future__ import annotations

from typing import Any

import pytest

from dmsc.planning.plan_judge import simulated_step_ms
from entities.planner.plan_request import BY_SEARCH, BY_SIMULATION, PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.plan_search import search_plan
from entities.planner.search.plan_trial import PlanTrial


def request(speeds: tuple[float, ...], **more: Any) -> PlanRequest:
    layers = tuple(PlanLayer(f"layer{number}", 60.0, 2e5, 1e5, 1e5, 8e3) for number in range(8))
    slots = tuple(PlanSlot("node", "a", number, 0, speed) for number, speed in enumerate(speeds))
    given = {"microbatches": 8, "constant_ms": 8.0, "instance_ms": 6.5} | more
    return PlanRequest(layers=layers, slots=slots, clusters=("a",), **given)


@pytest.mark.parametrize("replicas", [(1,), (4,), (2, 2), (1, 1, 1, 1)])
def test_the_judge_agrees_with_the_formula_where_instances_are_alike(replicas: tuple[int, ...]) -> None:
    asked = request((1.0,) * sum(replicas), stages=len(replicas), replicas=replicas)
    by_formula, judged = search_plan(asked), search_plan(asked, simulated_step_ms)
    print(f"{by_formula.forecast.step_ms:.1f} and {judged.forecast.step_ms:.1f} ms")
    assert judged.forecast.step_ms == pytest.approx(by_formula.forecast.step_ms, rel=0.02)
    assert (by_formula.planned_by, judged.planned_by) == (BY_SEARCH, BY_SIMULATION)


def test_a_plan_is_chosen_by_its_trial() -> None:
    """By the formula, stages that mix speeds are as good; senders make less of them."""
    asked = request((1.0, 1.0, 3.0, 3.0), stages=2, replicas=(2, 2))
    answer = search_plan(asked, simulated_step_ms)
    speeds = [
        {asked.slots[place.slot].speed for place in answer.places if place.stage == stage} for stage in (0, 1)
    ]
    assert sorted(map(sorted, speeds)) == [[1.0], [3.0]]
    forecast = answer.forecast
    parts = forecast.bottleneck_ms + forecast.fill_ms + forecast.reduction_ms + forecast.constant_ms
    assert forecast.step_ms == pytest.approx(parts)
    assert len(answer.alternatives) == 3
    shorter = [other for other in answer.alternatives if (other.step_ms or 0) < forecast.step_ms]
    assert all(other.why_not.endswith("the job asks for other stages or replicas") for other in shorter)
    assert "instances of speeds" in answer.reason
    assert any("wait for each other" in other.why_not for other in answer.alternatives)


def test_three_others_are_in_the_answer_or_it_says_that_there_are_fewer() -> None:
    many = search_plan(request((1.0, 1.0, 2.0, 4.0)), simulated_step_ms)
    assert len(many.alternatives) == 3
    assert "other plan" not in many.reason
    few = search_plan(request((1.0,), stages=1, replicas=(1,)), simulated_step_ms)
    assert len(few.alternatives) < 3
    assert f"no more than {len(few.alternatives)} other plan" in few.reason


def test_what_is_too_large_for_a_trial_keeps_the_formulas_forecast() -> None:
    def never(trial: PlanTrial) -> float:
        raise AssertionError(trial)

    large = request((1.0, 2.0), stages=2, replicas=(1, 1), microbatches=10_000)
    assert search_plan(large, never).planned_by == BY_SEARCH


def test_if_one_candidate_is_too_large_for_a_trial_none_is_tried() -> None:
    """A step by simulation beside one by the formula would decide by what counted them."""
    tried: list[PlanTrial] = []

    def judge(trial: PlanTrial) -> float:
        tried.append(trial)
        return simulated_step_ms(trial)

    small = search_plan(request((1.0,) * 4, stages=None, replicas=None), judge)
    assert small.planned_by == BY_SIMULATION
    assert len({len(trial.stages) for trial in tried}) > 1
    tried.clear()
    assert search_plan(request((1.0,) * 4, microbatches=4_000), judge).planned_by == BY_SEARCH
    assert not tried
