"""A split learnt from matrices, and trust among arms."""

from __future__ import annotations

import numpy as np
import pytest

from policies.contrib.split_learning import LearningConfig, Trust, learn, losses
from policies.contrib.topology_file import paths_over
from policies.numerics.allocation.path_split import Floats, Paths

QUICK = LearningConfig(steps=300, tail=0.0)


def triangle() -> Paths:
    """Three nodes, each pair directly or around; node 0's links are half as wide."""
    capacity = {
        (one, other): 1.0 if 0 in (one, other) else 2.0
        for one in range(3)
        for other in range(3)
        if one != other
    }
    return paths_over(capacity, [[[one, other], [one, 3 - one - other, other]] for one, other in capacity])


def matrices(seed: int, count: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    demands = rng.lognormal(0, 0.5, (count, 6)) * np.array([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    return demands, np.ones(count)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_better_than_shortest_paths_on_matrices_to_come(seed: int) -> None:
    paths, (demands, least) = triangle(), matrices(seed, 300)
    split = learn(paths, demands[:200], least[:200], seed=seed, config=QUICK)
    np.testing.assert_allclose(split.sum(axis=1), 1.0)
    learnt = losses(paths, demands[200:], least[200:], split).mean()
    direct = losses(paths, demands[200:], least[200:], paths.shortest()).mean()
    assert learnt < 0.8 * direct, f"seed {seed}"


def test_the_same_seed_gives_the_same_split() -> None:
    paths, (demands, least) = triangle(), matrices(1, 100)
    one, other = (learn(paths, demands, least, seed=7, config=QUICK) for _ in range(2))
    assert np.array_equal(one, other)


def test_the_tail_counts_for_more_where_asked() -> None:
    paths, (demands, least) = triangle(), matrices(2, 400)
    demands[::25, 3] *= 6  # now and then one demand is a burst
    found = [
        losses(
            paths,
            demands,
            least,
            learn(paths, demands, least, seed=2, config=LearningConfig(steps=400, tail=tail)),
        )
        for tail in (0.0, 3.0)
    ]
    mean, tail = (np.quantile(one, 0.98) for one in found)
    assert tail < mean


def test_losses_are_those_of_the_split() -> None:
    paths, (demands, least) = triangle(), matrices(3, 20)
    found = losses(paths, demands, 2 * least, paths.shortest())
    expected = [paths.worst(row, paths.shortest()) / 2 for row in demands]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_trust_goes_to_who_would_have_cost_less_and_follows_a_change() -> None:
    trust = Trust(arms=2)
    for _ in range(50):
        trust.saw([1.0, 1.3])
    assert trust.weights[0] > 0.99
    for _ in range(300):
        trust.saw([1.3, 1.0])
    assert trust.weights[1] > 0.99
    ones, zeros = np.ones((2, 2)), np.zeros((2, 2))
    assert trust.mix([zeros, ones])[0, 0] == pytest.approx(trust.weights[1])
