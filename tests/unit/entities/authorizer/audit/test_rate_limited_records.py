"""Refusals are recorded one by one up to a bound, then counted: nothing is lost silently, nothing floods."""

from __future__ import annotations

from entities.authorizer.audit.rate_limited_records import (
    RateLimitedRecords,
    RateLimitedRecordsConfig,
    Refusal,
)

CONFIG = RateLimitedRecordsConfig(window_s=10.0, each=2, groups=3)


def cancel(user: str, resource: str = "j") -> Refusal:
    return Refusal(user=user, action="job.cancel", resource=resource, reason="no")


def test_the_first_few_of_each_group_then_a_count() -> None:
    folding = RateLimitedRecords(CONFIG)
    taken = [folding.take("ann", cancel("ann", f"j{index}"), 1.0) for index in range(5)]
    assert taken == [True, True, False, False, False]
    assert folding.take("bob", cancel("bob"), 2.0), "another's are not hidden by it"
    assert folding.due(5.0) == 6.0
    (folded,) = folding.close()
    assert (folded.last, folded.count, folded.others) == (cancel("ann", "j4"), 3, False)
    assert folding.due(12.0) is None
    assert folding.take("ann", cancel("ann"), 12.0), "a new window"


def test_a_flood_of_groups_is_bounded() -> None:
    folding = RateLimitedRecords(CONFIG)
    recorded = sum(folding.take(f"u{index}", cancel(f"u{index}"), 1.0) for index in range(1_000))
    folded = folding.close()
    assert recorded == 3 + CONFIG.each
    assert [one.others for one in folded] == [True]
    assert recorded + sum(one.count for one in folded) == 1_000
