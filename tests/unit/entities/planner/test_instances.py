"""What a step takes on given instances, and which instances work for which stage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from entities.planner.search.instance_assignment import assign_instances
from entities.planner.search.layer_chain import LayerChain
from entities.planner.search.step_cost import NO_FIT, InstanceKind, StepCost, StepSettings, rounds


def chain(count: int = 6, seed: int = 0) -> LayerChain:
    draws = np.random.default_rng(seed)
    return LayerChain(
        names=tuple(map(str, range(count))),
        work_ms=draws.random(count) + 0.5,
        state_bytes=draws.random(count) * 100,
        activation_bytes=draws.random(count),
        reduction_bytes=np.full(count, 1e6),
        crossing_bytes=np.array([0.0, *draws.random(count - 1), 0.0]) * 1e5,
        edges=tuple(range(count + 1)),
    )


@pytest.mark.parametrize(
    ("speeds", "microbatches", "expected"),
    [
        (((1.0, 1),), 5, 5.0),
        (((1.0, 3),), 16, 6.0),  # the third of 16 is no whole number
        (((1.0, 2), (2.0, 2), (4.0, 1)), 16, 1.75),
        (((0.5, 1), (1.0, 1)), 3, 2.0),
    ],
)
def test_microbatches_are_not_divided(
    speeds: tuple[tuple[float, int], ...], microbatches: int, expected: float
) -> None:
    found = rounds(speeds, microbatches)
    done = sum(count * int(found * speed + 1e-9) for speed, count in speeds)
    assert done >= microbatches
    before = found - 1e-6
    assert sum(count * int(before * speed) for speed, count in speeds) < microbatches
    if len(speeds) < 3:
        assert found == pytest.approx(expected)


def test_the_cut_for_groups_is_close_to_the_best_of_all() -> None:
    kinds = [InstanceKind(1.0), InstanceKind(2.0)]
    for seed in range(5):
        cost = StepCost(chain(7, seed), kinds, StepSettings(microbatches=8, constant_ms=2))
        groups = [(1, 0), (0, 1), (1, 1)]
        step_ms, cuts = cost.best_cut(groups)
        assert step_ms == cost.forecast(cuts, groups).step_ms
        of_all = [
            cost.forecast(list(itertools.pairwise((0, *edges, 7))), groups).step_ms
            for edges in itertools.combinations(range(1, 7), 2)
        ]
        assert step_ms <= min(of_all) * 1.05, seed


def test_what_does_not_fit_says_by_how_much() -> None:
    small = StepCost(chain(), [InstanceKind(1.0, 10)], StepSettings(microbatches=4))
    smaller = StepCost(chain(), [InstanceKind(1.0, 5)], StepSettings(microbatches=4))
    assert small.best_cut([(2,), (2,)])[1] == []
    assert smaller.best_cut([(2,), (2,)])[0] == pytest.approx(2 * small.best_cut([(2,), (2,)])[0])


def test_pinned_layers_go_where_their_label_is() -> None:
    kinds = [InstanceKind(1.0), InstanceKind(1.0, labels=("site=lab",))]
    pins = [("site=lab",), ("site=lab",), (), (), (), ()]
    cost = StepCost(chain(), kinds, StepSettings(microbatches=4), pins)
    found = assign_instances(cost, [1, 1], 2)
    assert found.groups[0] == (0, 1)
    assert found.cuts[0][1] >= 2
    assert cost.best_cut([(1, 0), (0, 1)])[0] >= NO_FIT


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_what_trying_all_finds(seed: int) -> None:
    draws = np.random.default_rng(seed)
    kinds = [
        InstanceKind(float(speed), int(room))
        for speed, room in zip((0.5, 1, 2, 3), draws.choice([150, 250, 400], 4), strict=True)
    ]
    cost = StepCost(chain(8, seed), kinds, StepSettings(microbatches=8))
    searched = min(assign_instances(cost, [1] * 4, stages).step_ms for stages in (1, 2, 3))
    best = np.inf
    for stages in (1, 2, 3):
        for places in itertools.product(range(stages + 1), repeat=4):
            rows = [tuple(int(place == stage) for place in places) for stage in range(stages)]
            if all(map(any, rows)):
                best = min(best, cost.best_cut(rows)[0])
    assert searched <= best * 1.005


def test_a_given_shape_is_kept_and_the_rest_is_unused() -> None:
    cost = StepCost(chain(), [InstanceKind(1.0), InstanceKind(2.0)], StepSettings(microbatches=8))
    found = assign_instances(cost, [3, 2], 2, shape=(2, 1))
    assert [sum(group) for group in found.groups] == [2, 1]
    assert sum(found.unused) == 2


def test_an_instance_that_only_brings_a_reduction_stays_unused() -> None:
    costly = StepCost(
        chain(), [InstanceKind(1.0)], StepSettings(microbatches=2, link_bytes_per_s=1e6)
    )  # 6 s for the sums
    found = assign_instances(costly, [6], 1)
    assert found.groups == ((1,),)
    assert found.unused == (5,)


def test_a_forecast_explains_itself() -> None:
    cost = StepCost(chain(), [InstanceKind(1.0)], StepSettings(microbatches=8, constant_ms=3))
    groups = [(1,), (1,)]
    forecast = cost.forecast(cost.best_cut(groups)[1], groups)
    parts = forecast.bottleneck_ms + forecast.fill_ms + forecast.reduction_ms + forecast.constant_ms
    assert forecast.step_ms == pytest.approx(parts)
    assert 0 < forecast.bubble < 1
    assert "ms computing and waits" in forecast.reason()
