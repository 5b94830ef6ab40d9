"""Trying without paying for it: the safe arm's cost is never exceeded by more than the margin."""

from __future__ import annotations

import random

import pytest

from policies.numerics.conservative_bandit import FEWEST, ConservativeBandit


def played(means: list[float], turns: int, seed: int) -> tuple[float, list[int]]:
    """Cost beside always arm 0, and how often each was taken."""
    rng, bandit = random.Random(seed), ConservativeBandit(arms=len(means))
    taken, paid, safe = [0] * len(means), 0.0, 0.0
    for _ in range(turns):
        arm, noise = bandit.choose(), rng.gauss(0, 0.01)
        bandit.cost(arm, means[arm] + noise)
        taken[arm] += 1
        paid += means[arm] + noise
        safe += means[0] + noise
    return paid / safe, taken


@pytest.mark.parametrize("seed", range(5))
def test_a_better_arm_is_found_and_taken(seed: int) -> None:
    ratio, taken = played([1.0, 1.04, 0.9, 1.0], 400, seed)
    assert ratio < 0.95, f"seed {seed}"
    assert taken[2] > 200


@pytest.mark.parametrize("seed", range(5))
def test_where_none_is_better_the_trials_cost_no_more_than_the_margin(seed: int) -> None:
    ratio, taken = played([1.0, 1.08, 1.05, 1.1], 400, seed)
    assert ratio <= 1.011, f"seed {seed}"
    assert min(taken) >= 1, "each was tried"


def test_nothing_is_tried_before_the_safe_arm_is_known() -> None:
    bandit = ConservativeBandit(arms=2, margin=1.0)
    for _ in range(FEWEST):
        assert bandit.choose() == 0
        bandit.cost(0, 1.0)
    assert bandit.choose() == 1
