"""Short-term forecasts of many series at once: pooled L1 regression on each one's own recent past (pure).

One linear model serves all series, in the manner of global forecasting models (P. Montero-Manso, R. J.
Hyndman: Principles and algorithms for forecasting groups of time series, Int. J. Forecasting 37, 2021): it
sees a few hundred times more examples than a model per series would. It predicts the change over the horizon,
in units of each series' usual step, from

- the last changes and how far the value is from its moving averages (noise reverts, trends go on);
- the same times how the series' changes are correlated, so that noisy series revert more than smooth ones;
- what happened a season ago at this time, and what all series together do now and did then.

Values are taken by their square root, which steadies the variance of traffic. The fit is by iteratively
reweighted least squares to the absolute error in the original unit, with a ridge. Intervals are conformal
(`policies.numerics.conformal`), with residuals of a last part that the fit for them has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.numerics.conformal import Conformal
from policies.numerics.features import Floats

Indices = NDArray[np.int64]

LAGS = 6
SMOOTHING = (0.6, 0.4, 0.3, 0.2, 0.1, 0.03)
"""Parts that the newest value has in the moving averages."""
CLIP = 8.0
"""Features are drawn in to so many usual steps: one wild sample is no reason for a wild forecast."""
ROUNDS, LEAST = 8, 0.1
"""Of reweighting, and the absolute error below which all errors count alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastConfig:
    """What is fitted.

    Attributes:
        horizon: steps ahead.
        season: steps after which things repeat, as 96 for a day of quarters of an hour; 0: no season.
        ridge: shrinks towards "no change"; more for short histories.
        calibration: part of the history, its end, whose residuals give the intervals.
    """

    horizon: int = 1
    season: int = 0
    ridge: float = 30.0
    calibration: float = 0.25

    @property
    def reach(self) -> int:
        """Samples that one forecast looks back on; more than that changes it by next to nothing."""
        return self.season + 64

    @property
    def least(self) -> int:
        """Samples that a fit needs."""
        return self.season + LAGS + 2 + 4 * (self.horizon + LAGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """A fitted model. `scale` and `correlation` have shape `(series,)`."""

    config: ForecastConfig
    scale: Floats
    correlation: Floats
    coefficients: Floats
    conformal: Conformal
    """Of residuals of the square root, in units of `scale`."""

    def predict(self, history: Floats) -> Floats:
        """The value `horizon` steps after each series' last one.

        Args:
            history: `(times, series)`, oldest first, without gaps; the last `config.reach` are looked at.

        Returns:
            `(series,)`, never negative.
        """
        return self.value(self.level(history))

    def level(self, history: Floats) -> Floats:
        """The same in the model's own unit, to which `value`, `interval` and `above` belong."""
        recent = np.sqrt(history[-self.config.reach :]) / self.scale
        level: Floats = self.levels(recent, np.array([len(recent) - 1]))[0]
        return level

    def levels(self, scaled: Floats, rows: Indices) -> Floats:
        """Forecasts from several moments of a scaled history, shape `(rows, series)`."""
        found = features(scaled, rows, self.config, self.correlation) @ self.coefficients
        return np.maximum(scaled[rows] + found, 0.0)

    def value(self, level: Floats) -> Floats:
        value: Floats = (level * self.scale) ** 2
        return value

    def interval(self, level: Floats, coverage: float) -> tuple[Floats, Floats]:
        """Both ends in the original unit."""
        low, high = self.conformal.interval(level, coverage)
        return self.value(np.maximum(low, 0.0)), self.value(high)

    def above(self, level: Floats, threshold: Floats) -> Floats:
        """The probability of more than `threshold`, which is in the original unit."""
        return self.conformal.above(level, np.sqrt(threshold) / self.scale)


def fit(history: Floats, config: ForecastConfig) -> Trend:
    """Learn from `history`, shape `(times, series)`, not negative, oldest first, without gaps.

    Raises:
        ValueError: fewer than `config.least` samples.
    """
    if len(history) < config.least:
        raise ValueError(f"{len(history)} samples; a fit needs {config.least}")
    root = np.sqrt(history)
    first = len(history) - max(config.horizon, round(config.calibration * (len(history) - config.season)))
    early = _fit(root[:first], config)
    rows = np.arange(first, len(history) - config.horizon)
    if rows.size:
        scaled = root / early.scale
        residuals = (scaled[rows + config.horizon] - early.levels(scaled, rows)) * early.scale
    else:
        residuals = np.zeros((1, history.shape[1]))
    whole = _fit(root, config)
    return Trend(
        config=config,
        scale=whole.scale,
        correlation=whole.correlation,
        coefficients=whole.coefficients,
        conformal=Conformal.of(residuals / whole.scale),
    )


def _fit(root: Floats, config: ForecastConfig) -> Trend:
    """Without calibration."""
    steps = np.diff(root, axis=0)
    scale = np.abs(steps).mean(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = root / scale
    power = (steps**2).mean(axis=0)
    product = (steps[1:] * steps[:-1]).mean(axis=0)
    correlation = np.divide(product, power, out=np.zeros_like(power), where=power > 0)
    rows = np.arange(config.season + LAGS + 1, len(root) - config.horizon)
    examples = features(scaled, rows, config, correlation)
    wanted = np.clip(scaled[rows + config.horizon] - scaled[rows], -LAGS, LAGS).ravel()
    # What a step of the square root is worth in the original unit.
    worth = (root[rows] * scale).ravel()
    worth = worth / max(worth.mean(), 1e-12)
    coefficients = _least_absolute(examples.reshape(-1, examples.shape[-1]), wanted, worth, config.ridge)
    return Trend(
        config=config,
        scale=scale,
        correlation=correlation,
        coefficients=coefficients,
        conformal=Conformal.of(np.zeros((1, root.shape[1]))),
    )


def _least_absolute(examples: Floats, wanted: Floats, worth: Floats, ridge: float) -> Floats:
    """Coefficients of the weighted least absolute error, by reweighted least squares."""
    weights = worth
    penalty = ridge * np.eye(examples.shape[1])
    coefficients: Floats = np.zeros(examples.shape[1])
    for _ in range(ROUNDS):
        weighted = examples * weights[:, None]
        coefficients = np.asarray(
            np.linalg.solve(weighted.T @ examples + penalty, weighted.T @ wanted), dtype=np.float64
        )
        weights = worth / np.maximum(np.abs(wanted - examples @ coefficients), LEAST)
    return coefficients


def features(scaled: Floats, rows: Indices, config: ForecastConfig, correlation: Floats) -> Floats:
    """What is known at `rows` of `scaled`, shape `(rows, series, features)`."""
    smooth = _smoothed(scaled, rows, SMOOTHING)
    common = scaled.mean(axis=1, keepdims=True)
    away = scaled[rows] - smooth[SMOOTHING.index(0.3)]
    changes = [scaled[rows - lag] - scaled[rows - lag - 1] for lag in range(LAGS)]
    own = [
        *changes,
        *(scaled[rows] - average for average in smooth),
        *(each * correlation for each in (changes[0], changes[1], away, scaled[rows] - smooth[4])),
        np.clip(away, -1, 1),
        np.maximum(away - 2, 0),
        np.minimum(away + 2, 0),
    ]
    together = [
        *(common[rows - lag] - common[rows - lag - 1] for lag in range(3)),
        common[rows] - _smoothed(common, rows, (0.2,))[0],
    ]
    if config.season:
        then, ahead = rows - config.season, rows - config.season + config.horizon
        own += [
            scaled[ahead] - scaled[then],
            _around(scaled, ahead) - _around(scaled, then),
            scaled[rows] - scaled[then],
            smooth[SMOOTHING.index(0.2)] - _smoothed(scaled, then, (0.2,))[0],
        ]
        together.append(_smoothed(common, ahead, (0.6,))[0] - _smoothed(common, then, (0.6,))[0])
    shape = (len(rows), scaled.shape[1])
    columns = [*own, *(np.broadcast_to(each, shape) for each in together), np.ones(shape)]
    table: Floats = np.clip(np.stack(columns, axis=-1), -CLIP, CLIP)
    return table


def _around(values: Floats, rows: Indices) -> Floats:
    """Means of three, `(rows, series)`. A row later than the season ago is in the past all the same."""
    return (values[rows - 1] + values[rows] + values[rows + 1]) / 3


def _smoothed(values: Floats, rows: Indices, parts: tuple[float, ...]) -> Floats:
    """Exponential moving averages at `rows`, shape `(parts, rows, series)`.

    By one product with `(parts, rows, times)` weights: fast for the single row of a forecast, and fine for
    fits to hundreds of samples.
    """
    age = rows[:, None] - np.arange(len(values))
    part = np.array(parts)[:, None, None]
    weights = np.where(age >= 0, part * (1 - part) ** np.maximum(age, 0), 0.0)
    weights[:, :, 0] = (1 - part[:, :, 0]) ** rows  # the first value is where the average starts
    return weights @ values
