"""The rules of the orchestrator's lease: silence is measured, terms only grow, a look away begins anew."""

from __future__ import annotations

import pytest

from entities.election.lease import (
    LATE,
    LeadershipLeaseConfig,
    Silence,
    certain_until,
    claimable,
    is_same_leadership,
    next_claim,
)
from schemas.leadership import Leadership


def held(**changes: object) -> Leadership:
    return Leadership(incarnation="one", term=3, lease_s=2.0).model_copy(update=changes)


def test_silence_counts_from_the_first_look_at_a_revision() -> None:
    silence = Silence(1.0)
    assert silence.observe(7, 10.0) == 0.0
    assert silence.observe(7, 11.5) == 1.5
    assert silence.observe(8, 12.0) == 0.0  # it was renewed
    assert silence.observe(8, 13.0) == 1.0


def test_who_could_not_look_begins_anew() -> None:
    """The holder may not have been able to renew either: the bus was away, or elected a leader."""
    silence = Silence(1.0)
    silence.observe(7, 10.0)
    silence.interrupt()
    assert silence.observe(7, 30.0) == 0.0


def test_who_stood_still_has_seen_nothing_meanwhile() -> None:
    """The holder may have stood still as well, on the same machine, and renews it in a moment."""
    silence = Silence(0.2)
    silence.observe(7, 10.0)
    assert silence.observe(7, 10.2) == pytest.approx(0.2)
    assert silence.observe(7, 40.0) == pytest.approx(0.2 + LATE * 0.2)
    assert silence.observe(7, 40.2) == pytest.approx(0.4 + LATE * 0.2)


def test_the_holder_says_how_long_its_lease_is() -> None:
    assert not claimable(held(), 1.99)
    assert claimable(held(), 2.0)
    assert claimable(held(released=True), 0.0)


def test_terms_grow_by_one_and_begin_at_one() -> None:
    first = next_claim(0, incarnation="one", lease_s=1.0, node="n", pid=1)
    assert first.term == 1
    second = next_claim(first.term, incarnation="two", lease_s=1.0, node="n", pid=2)
    assert (second.term, second.released, second.renewal) == (2, False, 0)
    assert not is_same_leadership(first, second)
    assert is_same_leadership(second, second.model_copy(update={"renewal": 5}))


def test_the_holder_is_sure_for_less_than_others_wait() -> None:
    config = LeadershipLeaseConfig()
    assert certain_until(10.0, config.lease_s) < 10.0 + config.lease_s
    assert certain_until(10.0, config.lease_s) > 10.0 + 2 * config.renew_s


def test_a_look_must_be_shorter_than_the_lease() -> None:
    with pytest.raises(ValueError, match="check_s"):
        LeadershipLeaseConfig(lease_s=0.2, check_s=0.2)
