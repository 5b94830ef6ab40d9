"""A candidate that fails its first requests goes back at once; one that is no worse stays."""

from __future__ import annotations

import json
import random

import pytest

from entities.services.hard_rule import HardRule, HardRuleConfig, chance_of_so_many


def run(candidate_fails: float, stable_fails: float, seed: int, share: float = 0.05) -> HardRule:
    draw, rule = random.Random(seed), HardRule()
    for _ in range(int(30 / share)):
        mine = draw.random() < share
        rule.add(candidate=mine, ok=draw.random() >= (candidate_fails if mine else stable_fails))
    return rule


def test_a_candidate_that_always_fails_goes_back_with_its_fifth_failure_or_soon_after() -> None:
    rule = HardRule()
    for at in range(120):
        if rule.add(candidate=at % 20 == 0, ok=at % 20 != 0):
            break
    assert at == 100
    assert rule.reason
    assert rule.reason.startswith("5 of its first 5 requests failed, 0 of 95 of the stable version")
    assert all(run(1.0, 0.05, seed).reason for seed in range(20))


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05, 0.2, 0.6])
def test_a_candidate_that_is_no_worse_stays(rate: float) -> None:
    assert not [seed for seed in range(60) if run(rate, rate, seed, share=0.2).reason]


def test_an_outage_that_meets_both_says_nothing() -> None:
    for seed in range(60):
        draw, rule = random.Random(seed), HardRule()
        for at in range(200):
            rule.add(candidate=draw.random() < 0.1, ok=not 40 <= at < 140)
        assert rule.reason is None, f"seed {seed}"


def test_all_looks_together_keep_the_level() -> None:
    """Over every choice of the candidate's requests: the share that is condemned at some look."""
    config = HardRuleConfig(first=8, failures=2, level=0.05)
    condemned, draw = 0, random.Random(1)
    for _ in range(4000):
        rule = HardRule(config)
        mine = [draw.random() < 0.4 for _ in range(40)]
        condemned += any(rule.add(candidate=one, ok=at % 3 != 0) is not None for at, one in enumerate(mine))
    assert condemned / 4000 <= 0.05


def test_few_failures_and_late_ones_are_left_to_the_judge() -> None:
    rule = HardRule()
    for at in range(2000):
        rule.add(candidate=at % 20 == 0, ok=at % 20 != 0 or at > 60)
    assert rule.reason is None
    for at in range(200):
        rule.add(candidate=at % 20 == 0, ok=at % 20 != 0)
    assert rule.reason is None  # its first requests were over


def test_counts_go_on_with_a_new_leader_and_begin_anew_with_new_weights() -> None:
    rule, other = HardRule(), HardRule()
    for at in range(80):
        rule.add(candidate=at % 20 == 0, ok=at % 20 != 0)
    other.restore(json.loads(json.dumps(rule.as_data())))
    assert other.as_data() == rule.as_data()
    other.weights_changed()
    assert other.as_data() == {
        "candidate": 0,
        "candidate_failed": 0,
        "stable": 0,
        "stable_failed": 0,
        "looked_at": 4,
    }


def test_fishers_chance_of_the_lady_tasting_tea() -> None:
    assert chance_of_so_many(4, 4, 4, 4) == pytest.approx(1 / 70)
    assert chance_of_so_many(3, 4, 4, 4) == pytest.approx(17 / 70)
    with pytest.raises(ValueError, match="6 failures of the first 5"):
        HardRuleConfig(first=5, failures=6)
