"""A block multiplies the wealth by a bet of mean 1, over all choices of the candidate's requests."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from policies.numerics.sequential.permutation_test import (
    PermutationTest,
    log_evidence,
    marks,
    normal_scores,
    worst_tenth,
)

TILTS = np.array([0.3, 1.0, 3.0, 5.0])
BLOCKS = {
    "failures": np.array([0.0, 1, 0, 0, 1, 0, 0]),
    "ranks": normal_scores(np.array([0.1, 7.0, 0.3, 1e9, 0.2, 5.0, 6.0])),
    "ties": normal_scores(np.array([1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 0.0])),
    "nothing": np.ones(7),
}


def choices(requests: int, count: int) -> list[np.ndarray]:
    chosen = []
    for places in combinations(range(requests), count):
        mask = np.zeros(requests, dtype=bool)
        mask[list(places)] = True
        chosen.append(mask)
    return chosen


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("block", BLOCKS)
def test_the_mean_over_all_choices_is_one(block: str, count: int) -> None:
    scores = BLOCKS[block]
    bets = [np.exp(log_evidence(scores, chosen, TILTS)) for chosen in choices(scores.size, count)]
    assert np.mean(bets, axis=0) == pytest.approx(np.ones(TILTS.size), abs=1e-9)


def test_failures_are_bet_on_as_by_fisher() -> None:
    odds, failed, requests, mine = 7.0, 3, 12, 5
    scores = np.array([1.0] * failed + [0.0] * (requests - failed))
    chosen = np.zeros(requests, dtype=bool)
    chosen[[0, 1, 5, 6, 7]] = True  # two of the failures are the candidate's
    ways = [math.comb(failed, of) * math.comb(requests - failed, mine - of) for of in range(failed + 1)]
    expected = odds**2 * sum(ways) / sum(way * odds**of for of, way in enumerate(ways))
    assert math.exp(log_evidence(scores, chosen, np.array([math.log(odds)]))[0]) == pytest.approx(expected)


def test_less_bad_outcomes_of_the_candidate_are_never_more_evidence() -> None:
    values, chosen = (
        np.array([5.0, 1.0, 4.0, 2.0, 3.0, 0.0]),
        np.array([True, False, True, False, False, False]),
    )
    evidence = [
        log_evidence(normal_scores(np.where(chosen, values - better, values)), chosen, TILTS)
        for better in (0.0, 1.5, 3.5, 9.0)
    ]
    assert all((more >= less - 1e-12).all() for more, less in pairwise(evidence))


def test_scores_keep_neither_scale_nor_tail_and_ties_share() -> None:
    values = np.array([3.0, 1.0, 2.0, 2.0])
    assert normal_scores(values) == pytest.approx(normal_scores(np.exp(10 * values)))
    assert normal_scores(values)[2] == normal_scores(values)[3] == pytest.approx(0.0)
    assert worst_tenth(np.arange(20.0)).sum() == 2
    assert worst_tenth(np.arange(5.0)).tolist() == [0, 0, 0, 0, 1]


def test_levels_of_all_rounds_add_up() -> None:
    test, total = PermutationTest(0.01, TILTS, (marks,)), 0.0
    for _ in range(10_000):
        total += test.level
        test.begin_round()
    assert 0.0099 < total <= 0.01


def test_a_state_goes_on_and_one_of_another_test_is_refused() -> None:
    test = PermutationTest(0.01, TILTS, (normal_scores, worst_tenth))
    chosen = np.array([True, False, False])
    test.bet(np.array([3.0, 1.0, 2.0]), chosen)
    after = PermutationTest(0.01, TILTS, (normal_scores, worst_tenth))
    after.restore(json.loads(json.dumps(test.as_data())))
    for each in (test, after):
        each.bet(np.array([1.0, 3.0, 2.0]), chosen)
    assert after.log_wealth == test.log_wealth != 0.0
    with pytest.raises(ValueError, match="8 bets, this one has 4"):
        PermutationTest(0.01, TILTS, (marks,)).restore(test.as_data())
