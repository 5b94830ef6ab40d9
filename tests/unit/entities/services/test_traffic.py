"""Weights are kept exactly, a change moves only the difference, and what cannot be is refused in one line."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from entities.services.traffic import BUCKETS, TrafficShares, bucket_of
from schemas.errors import BadInput, Conflict, DmscError
from tests.builders.services import served_by

READY = ("v1", "v2", "v3")


def owners(shares: TrafficShares) -> list[str]:
    return [shares.version_of(bucket) for bucket in range(BUCKETS)]


def test_ten_thousand_keys_are_shared_within_the_binomial_interval() -> None:
    shares = TrafficShares.of("v1").with_weight("v2", 500, stable="v1", ready=READY)
    assert shares.weights == {"v1": 9500, "v2": 500}
    met = Counter(shares.version_of(bucket_of(f"user-{number}", "salt")) for number in range(10_000))
    assert 444 <= met["v2"] <= 557  # 99 % of a binomial of 10,000 and 0.05


def test_a_change_moves_only_the_difference() -> None:
    draw = random.Random(4)
    shares = TrafficShares.of("v1")
    before = owners(shares)
    for _ in range(12):
        cuts = sorted(draw.choice([0, draw.randrange(BUCKETS), BUCKETS]) for _ in range(2))
        weights = {"v1": cuts[0], "v2": cuts[1] - cuts[0], "v3": BUCKETS - cuts[1]}
        grown = sum(max(0, weights[name] - shares.weights.get(name, 0)) for name in weights)
        shares = shares.change(weights, READY)
        after = owners(shares)
        assert shares.weights == {name: weight for name, weight in weights.items() if weight}
        assert sum(one != other for one, other in zip(before, after, strict=True)) == grown
        assert all(one.end == two.first for one, two in zip(shares.runs, shares.runs[1:], strict=False))
        assert all(one.version != two.version for one, two in zip(shares.runs, shares.runs[1:], strict=False))
        before = after


def test_a_version_that_is_tried_again_meets_the_same_users() -> None:
    tried = TrafficShares.of("v1").with_weight("v2", 100, stable="v1", ready=READY)
    back = tried.with_weight("v2", 0, stable="v1", ready=READY)
    assert back == TrafficShares.of("v1")
    assert back.with_weight("v2", 100, stable="v1", ready=READY) == tried


def test_blue_green_is_one_change() -> None:
    assert TrafficShares.of("v1").change({"v1": 0, "v2": BUCKETS}, READY) == TrafficShares.of("v2")


@pytest.mark.parametrize(
    ("weights", "error", "told"),
    [
        ({"v1": 9500, "v2": 600}, BadInput, r"v1=9500, v2=600 adds up to 10100, not to 10000"),
        ({}, BadInput, "of no version adds up to 0"),
        ({"v1": 10100, "v2": -100}, BadInput, "negative"),
        ({"v1": 9000, "v9": 1000}, Conflict, r"v9 is not ready.*\(ready: v1, v2, v3\)"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    weights: dict[str, int], error: type[DmscError], told: str
) -> None:
    with pytest.raises(error, match=told):
        TrafficShares.of("v1").change(weights, READY)


def test_more_than_the_stable_version_has_is_refused() -> None:
    shares = TrafficShares.of("v1").change({"v1": 4000, "v3": 6000}, READY)
    with pytest.raises(BadInput, match="v2=5000 is 1000 more than v1 can give"):
        shares.with_weight("v2", 5000, stable="v1", ready=READY)
    with pytest.raises(BadInput, match="v1 is the stable version"):
        shares.with_weight("v1", 5000, stable="v1", ready=READY)


def test_who_picks_keys_does_not_pick_versions_without_the_salt() -> None:
    assert bucket_of("alice", "one") == bucket_of("alice", "one") != bucket_of("alice", "two")
    with pytest.raises(ValueError, match="bucket 10000"):
        TrafficShares.of("v1").version_of(BUCKETS)


def test_a_record_names_the_owners_and_one_without_runs_gives_the_same_ones_everywhere() -> None:
    assert TrafficShares.of_service(served_by()) is None
    weights = {"v2": 500, "v1": 9_500}
    earlier = TrafficShares.of_service(served_by(weights=weights))
    assert earlier is not None
    assert earlier.weights == weights
    assert TrafficShares.of_service(served_by(weights={"v1": 9_500, "v2": 500})) == earlier
    assert TrafficShares.of_service(served_by(weights=weights, runs=earlier.runs)) == earlier
