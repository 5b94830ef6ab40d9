"""How long an all-reduce may take."""

from __future__ import annotations

from schemas.limits import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S
from workers.links.reduction import ReductionPatience

TIMEOUT_S = 5.0
SUM_BYTES = int(SLOWEST_BYTES_PER_S) * 60


def test_patience_grows_with_what_has_to_cross_the_slowest_link() -> None:
    assert ReductionPatience(TIMEOUT_S).timeout_s(0) == TIMEOUT_S
    assert ReductionPatience(TIMEOUT_S).timeout_s(SUM_BYTES) == TIMEOUT_S + 120


def test_a_slower_way_than_was_thought_has_more_time_after_each_that_was_too_little() -> None:
    patience, needed_s = ReductionPatience(TIMEOUT_S), 2 * SUM_BYTES / 250e3
    tries = 0
    while (allowed_s := patience.timeout_s(SUM_BYTES)) < needed_s:
        patience.failed(SUM_BYTES, allowed_s)
        tries += 1
    assert tries == 2, "a step is tried again three times and more"
    patience.took(SUM_BYTES, needed_s)
    assert patience.timeout_s(SUM_BYTES) > 3 * needed_s, "now it is known"
    for _ in range(20):
        patience.failed(SUM_BYTES, patience.timeout_s(SUM_BYTES))
    assert patience.timeout_s(SUM_BYTES) == TIMEOUT_S + 2 * SUM_BYTES / LEAST_BYTES_PER_S


def test_a_member_that_dies_and_a_fast_way_change_no_patience() -> None:
    patience = ReductionPatience(TIMEOUT_S)
    patience.failed(SUM_BYTES, 3.0)
    patience.took(SUM_BYTES, 1.0)
    assert patience.timeout_s(SUM_BYTES) == ReductionPatience(TIMEOUT_S).timeout_s(SUM_BYTES)
