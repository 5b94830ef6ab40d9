"""Mean time between failures, while it changes."""

from __future__ import annotations

import numpy as np
import pytest

from policies.numerics.failure_rate import FailureRate

HOUR_S = 3600.0


def after(gaps: np.ndarray, expected_s: float = 24 * HOUR_S) -> tuple[FailureRate, float]:
    rate, now_s = FailureRate(expected_s), 0.0
    for gap in gaps:
        now_s += float(gap)
        rate.failed(now_s)
    return rate, now_s


def test_nothing_seen_is_the_expectation_and_quiet_lengthens_it() -> None:
    rate = FailureRate(1000.0)
    assert rate.between_s(0.0) == pytest.approx(1000.0)
    assert 1000.0 < rate.between_s(500.0) < rate.between_s(5000.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_steady_rate_is_found(seed: int) -> None:
    gaps = np.random.default_rng(seed).exponential(2 * HOUR_S, 200)
    rate, now_s = after(gaps)
    assert rate.between_s(now_s) == pytest.approx(2 * HOUR_S, rel=0.5), f"seed {seed}"


@pytest.mark.parametrize("seed", range(4))
def test_another_regime_is_noticed_within_some_failures(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rate, now_s = after(np.concatenate([rng.exponential(24 * HOUR_S, 60), rng.exponential(0.5 * HOUR_S, 12)]))
    found_s = rate.between_s(now_s)
    assert found_s < 2 * HOUR_S, f"seed {seed}"
    assert rate.between_s(now_s + 24 * HOUR_S) > 4 * found_s, "and a quiet day says that it is over"


def test_failures_at_one_moment_and_many_of_them_are_no_problem() -> None:
    rate, now_s = after(np.zeros(300))
    assert np.isfinite(rate.between_s(now_s))
    assert rate.failures == 300
