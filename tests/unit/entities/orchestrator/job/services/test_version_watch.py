"""A version that fails its first requests goes back, whoever tells it in which order."""

from __future__ import annotations

from entities.orchestrator.job.services.version_watch import FirstRequests
from schemas.services.outcomes import AnsweredRequest
from tests.builders.services import ended, served_by, told_of

HALF = served_by(weights={"v1": 5_000, "v2": 5_000}, stable="v1", revision=7)


def requests(version: str, number: int, *, ok: bool = True, key: int | None = None) -> list[AnsweredRequest]:
    return [ended(version, ok=ok, key=key) for _ in range(number)]


def test_failures_of_the_first_requests_are_told_with_both_figures() -> None:
    first = FirstRequests()
    assert first.take(told_of(HALF, *requests("v1", 40))) == {}
    found = first.take(told_of(HALF, *requests("v2", 10, ok=False)))
    assert list(found) == ["v2"]
    assert "of its first" in found["v2"]
    assert "0 of 40 of the stable version" in found["v2"]


def test_what_meets_both_versions_says_nothing() -> None:
    first = FirstRequests()
    outage = [*requests("v1", 20, ok=False), *requests("v2", 20, ok=False)]
    assert first.take(told_of(HALF, *outage)) == {}


def test_a_user_counts_once() -> None:
    """One who has drawn the version asks it again and again."""
    first = FirstRequests()
    told = told_of(HALF, *requests("v1", 100), *requests("v2", 20, ok=False, key=5))
    assert first.take(told) == {}


def test_requests_by_earlier_weights_are_not_compared() -> None:
    first = FirstRequests()
    later = HALF.model_copy(update={"weights": {"v1": 9_000, "v2": 1_000}, "revision": 9})
    first.take(told_of(later, *requests("v1", 100)))
    assert first.take(told_of(HALF, *requests("v2", 20, ok=False))) == {}
    assert "v2" in first.take(told_of(later, *requests("v2", 8, ok=False)))


def test_a_change_of_weights_begins_anew_and_gives_no_looks_back() -> None:
    first = FirstRequests()
    first.take(told_of(HALF, *requests("v1", 50), *requests("v2", 20)))
    later = HALF.model_copy(update={"weights": {"v1": 9_000, "v2": 1_000}, "revision": 9})
    assert first.take(told_of(later, *requests("v1", 100), *requests("v2", 20, ok=False))) == {}


def test_nobody_is_compared_with_a_version_without_traffic_or_by_copies() -> None:
    first = FirstRequests()
    promoted = served_by(weights={"v2": 10_000}, stable="v1")
    assert first.take(told_of(promoted, *requests("v2", 20, ok=False))) == {}
    mirrored = served_by(weights={"v1": 10_000}, stable="v1", shadow=("v2",))
    assert first.take(told_of(mirrored, *requests("v1", 20), *requests("v2", 20, ok=False))) == {}
