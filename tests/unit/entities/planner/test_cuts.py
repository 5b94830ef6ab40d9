"""Cuts of chains, beside all cuts there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from entities.planner.search.chain_cut import interval_sums, least_bottleneck, least_sum


def all_cuts(count: int, stages: int) -> list[list[tuple[int, int]]]:
    return [
        list(itertools.pairwise((0, *edges, count)))
        for edges in itertools.combinations(range(1, count), stages - 1)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_of_a_chain_is_the_best_of_all(seed: int) -> None:
    draws = np.random.default_rng(seed)
    costs = [interval_sums(draws.random(9)) for _ in range(3)]
    costs[1][2:4, :] = np.inf
    bottleneck, cuts = least_bottleneck(costs)
    of_all = [
        max(costs[stage][first, last] for stage, (first, last) in enumerate(cut)) for cut in all_cuts(9, 3)
    ]
    assert bottleneck == pytest.approx(min(of_all))
    assert max(costs[stage][first, last] for stage, (first, last) in enumerate(cuts)) == bottleneck


def test_the_least_sum_keeps_the_bottleneck() -> None:
    draws = np.random.default_rng(3)
    costs = [interval_sums(draws.random(9))] * 3
    weights = [np.where(np.isfinite(costs[0]), draws.random((10, 10)), 0.0) for _ in range(3)]
    bottleneck, _ = least_bottleneck(costs)
    total, _ = least_sum(weights, costs, 1.2 * bottleneck)
    of_all = [
        sum(weights[stage][first, last] for stage, (first, last) in enumerate(cut))
        for cut in all_cuts(9, 3)
        if all(costs[stage][first, last] <= 1.2 * bottleneck for stage, (first, last) in enumerate(cut))
    ]
    assert total == pytest.approx(min(of_all))


def test_more_stages_than_layers_have_no_cut() -> None:
    assert least_bottleneck([interval_sums(np.ones(2))] * 3) == (np.inf, [])
