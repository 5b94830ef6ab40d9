"""Waiting or replacing, and hysteresis."""

from __future__ import annotations

import numpy as np
import pytest

from policies.numerics.outages import Flapping, OutageHistory

PRICE_S = 100.0


def learnt(seconds: list[float], kind: str = "link") -> OutageHistory:
    outages = OutageHistory(PRICE_S)
    for one in seconds:
        outages.ended(kind, one)
    return outages


def test_flaps_are_waited_for_somewhat_longer_than_they_last() -> None:
    assert 4 < learnt([2.0, 3.0, 4.0, 1e4] * 20).patience_s("link") < 30


def test_what_always_lasts_is_replaced_at_once() -> None:
    assert learnt([1e5] * 40, "device").patience_s("device") == 0


def test_it_never_waits_longer_than_a_replacement_costs() -> None:
    rng = np.random.default_rng(1)
    assert learnt(list(rng.uniform(0, 3 * PRICE_S, 100))).patience_s("link") <= PRICE_S
    assert 0 <= OutageHistory(PRICE_S).patience_s("never seen") <= PRICE_S


def test_kinds_are_told_apart() -> None:
    outages = learnt([2.0] * 30)
    for _ in range(30):
        outages.ended("device", 1e4)
    assert outages.patience_s("link") > 4
    assert outages.patience_s("device") < outages.patience_s("link")


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_is_near_that_of_whoever_knows_the_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = np.where(rng.random(400) < 0.3, 1e4, rng.lognormal(1, 0.5, 400))
    outages, cost = OutageHistory(PRICE_S), 0.0
    for one in seconds:
        patience = outages.patience_s("link")
        cost += one if one <= patience else patience + PRICE_S
        outages.ended("link", float(one))
    best = min(np.where(seconds <= wait, seconds, wait + PRICE_S).sum() for wait in np.linspace(0, 100, 201))
    assert cost <= 1.1 * best, f"seed {seed}"


def test_the_longer_it_lasts_the_likelier_it_goes_on() -> None:
    outages = learnt([2.0] * 15 + [1e4] * 15)
    chances = [outages.lasting("link", elapsed) for elapsed in (0.0, 5.0, 50.0, 1e3)]
    assert chances == sorted(chances)
    assert chances[0] < 0.6 < 0.9 < chances[-1]


def test_what_flaps_is_shunned_until_well_below_the_limit() -> None:
    flapping = Flapping(half_life_s=100.0, high=3.0, low=1.0)
    for at in (0.0, 1.0, 2.0):
        assert not flapping.shunned(at)
        flapping.fell(at)
    flapping.fell(3.0)
    assert flapping.shunned(3.0)
    assert flapping.shunned(3.0 + 100.0)  # below the upper limit, above the lower one
    back = 3.0 + flapping.back_s(3.0)
    assert not flapping.shunned(back + 1)
    flapping.trusted(back + 1)
    flapping.fell(back + 2)
    assert not flapping.shunned(back + 2), "one more outage after that is not a habit yet"
