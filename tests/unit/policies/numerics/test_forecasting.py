"""Forecasts, their intervals, and the test that declines: on series made here, with printed seeds."""

from __future__ import annotations

import numpy as np
import pytest

from policies.numerics.conformal import Conformal
from policies.numerics.forecasting import ForecastConfig, fit
from policies.numerics.serial_correlation import serial_correlation

SEED = 11


def waves(times: int, series: int, noise: float) -> np.ndarray:
    """Positive series with a season of 24, each with its own phase, and noise that reverts."""
    print("seed", SEED)
    drawn = np.random.default_rng(SEED)
    phase = drawn.uniform(0, 2 * np.pi, series)
    season = np.sin(2 * np.pi * np.arange(times)[:, None] / 24 + phase)
    return np.maximum(10 + 4 * season + noise * drawn.standard_normal((times, series)), 0.1)


@pytest.mark.parametrize("season", [0, 24])
def test_forecasts_beat_the_last_value(season: int) -> None:
    values = waves(200, 12, 1.0)
    config = ForecastConfig(horizon=3, season=season)
    model = fit(values[:150], config)
    rows = range(150, 197)
    found = np.stack([model.predict(values[: row + 1]) for row in rows])
    truth, last = values[153:200], values[150:197]
    assert np.abs(found - truth).mean() < 0.6 * np.abs(last - truth).mean()


def test_a_forecast_hangs_on_the_past_alone() -> None:
    values = waves(160, 5, 1.0)
    model = fit(values[:120], ForecastConfig(season=24))
    before = model.predict(values[:140])
    values[140:] = 1000.0
    assert np.array_equal(model.predict(values[:140]), before)


def test_intervals_and_probabilities_are_calibrated() -> None:
    values = waves(400, 20, 1.5)
    model = fit(values[:300], ForecastConfig(season=24))
    rows = range(300, 399)
    levels = np.stack([model.level(values[: row + 1]) for row in rows])
    truth = values[301:400]
    low, high = model.interval(levels, 0.9)
    assert 0.85 <= np.mean((low <= truth) & (truth <= high)) <= 0.95
    chance = model.above(levels, np.full(20, 12.0))
    assert abs(float(chance.mean()) - float((truth > 12.0).mean())) < 0.05
    assert ((chance >= 0) & (chance <= 1)).all()


def test_probabilities_fall_with_the_threshold_also_beyond_all_residuals() -> None:
    drawn = np.random.default_rng(SEED)
    conformal = Conformal.of(drawn.standard_normal((50, 1)))
    chances = [float(conformal.above(np.zeros(1), np.full(1, at))[0]) for at in np.linspace(-9, 9, 60)]
    assert all(now > then for then, now in zip(chances[1:], chances, strict=False))
    assert 0 < chances[-1] < 0.01 < 0.99 < chances[0] < 1


def test_a_constant_series_is_no_trouble() -> None:
    values = waves(120, 3, 1.0)
    values[:, 1] = 7.0
    assert fit(values, ForecastConfig()).predict(values)[1] == pytest.approx(7.0, abs=0.5)


def test_too_short_a_history_is_refused() -> None:
    with pytest.raises(ValueError, match="10 samples; a fit needs"):
        fit(waves(10, 3, 1.0), ForecastConfig())


def test_noise_is_not_forecast_and_waves_are() -> None:
    print("seed", SEED)
    noise = np.random.default_rng(SEED).standard_normal((300, 40))
    assert not serial_correlation(noise).forecastable
    assert serial_correlation(noise).correlated < 0.1
    found = serial_correlation(waves(300, 40, 1.0))
    assert found.forecastable
    assert "may be forecast" in str(found)
    assert not serial_correlation(np.ones((300, 4))).forecastable
    assert not serial_correlation(noise[:5]).forecastable
