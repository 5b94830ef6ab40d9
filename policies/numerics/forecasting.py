"""Short-term forecasts of many series at once: pooled L1 regression on each one's own recent past (pure).

One linear model serves all series, like global forecasting models (P. Montero-Manso, R. J. Hyndman:
Principles and algorithms for forecasting groups of time series, Int. J. Forecasting 37, 2021): it sees a few
hundred times more examples than a model per series would. It predicts the change over the horizon, in units
of each series' usual step, from

- the last changes, and the distances of the value from its moving averages (noise reverts, trends continue);
- the same, multiplied by the correlation of the series' changes, so that noisy series revert more than smooth
  ones;
- the change a season ago at this time, and the changes of all series together now and then.

Values are replaced by their square roots, which steadies the variance of traffic. The fit minimises the
absolute error in the original unit by iteratively reweighted least squares, with a ridge. Intervals are
conformal (`policies.numerics.conformal`), with residuals of a last part that their fit has not seen.
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
"""Weights of the newest value in the moving averages."""
CLIP = 8.0
"""Features are clipped to this many usual steps, so that one wild sample does not cause a wild forecast."""
ROUNDS, LEAST = 8, 0.1
"""Rounds of reweighting, and the absolute error below which all errors have the same weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastConfig:
    """Settings of a fit.

    Attributes:
        horizon: Steps ahead.
        season: Steps after which values repeat, such as 96 for a day of quarters of an hour; 0: no season.
        ridge: Shrinks towards "no change"; larger for short histories.
        calibration: Share of the history, at its end, whose residuals give the intervals.
    """

    horizon: int = 1
    season: int = 0
    ridge: float = 30.0
    calibration: float = 0.25

    @property
    def reach(self) -> int:
        """Past samples that one forecast uses; more would change it hardly at all."""
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
    """Distribution of residuals of the square root, in units of `scale`."""

    def predict(self, history: Floats) -> Floats:
        """The value `horizon` steps after each series' last one.

        Args:
            history: `(times, series)`, oldest first, without gaps; the last `config.reach` are used.

        Returns:
            `(series,)`, never negative.
        """
        return self.value(self.level(history))

    def level(self, history: Floats) -> Floats:
        """The forecast in the model's own unit, which `value`, `interval` and `above` take."""
        recent = np.sqrt(history[-self.config.reach :]) / self.scale
        level: Floats = self.levels(recent, np.array([len(recent) - 1]))[0]
        return level

    def levels(self, scaled: Floats, rows: Indices) -> Floats:
        """Forecasts from several moments of a scaled history, shape `(rows, series)`."""
        change = features(scaled, rows, self.config, self.correlation) @ self.coefficients
        return np.maximum(scaled[rows] + change, 0.0)

    def value(self, level: Floats) -> Floats:
        value: Floats = (level * self.scale) ** 2
        return value

    def interval(self, level: Floats, coverage: float) -> tuple[Floats, Floats]:
        """Lower and upper ends of the interval, in the original unit."""
        low, high = self.conformal.interval(level, coverage)
        return self.value(np.maximum(low, 0.0)), self.value(high)

    def above(self, level: Floats, threshold: Floats) -> Floats:
        """The probability of a value above `threshold`, which is in the original unit."""
        return self.conformal.above(level, np.sqrt(threshold) / self.scale)


def fit(history: Floats, config: ForecastConfig) -> Trend:
    """Fits a model to `history`, shape `(times, series)`, not negative, oldest first, without gaps.

    Raises:
        ValueError: There are fewer than `config.least` samples.
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
    """Fits a model without calibration."""
    steps = np.diff(root, axis=0)
    scale = np.abs(steps).mean(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = root / scale
    power = (steps**2).mean(axis=0)
    product = (steps[1:] * steps[:-1]).mean(axis=0)
    correlation = np.divide(product, power, out=np.zeros_like(power), where=power > 0)
    rows = np.arange(config.season + LAGS + 1, len(root) - config.horizon)
    examples = features(scaled, rows, config, correlation)
    targets = np.clip(scaled[rows + config.horizon] - scaled[rows], -LAGS, LAGS).ravel()
    # The size of a step of the square root in the original unit.
    worth = (root[rows] * scale).ravel()
    worth = worth / max(worth.mean(), 1e-12)
    coefficients = _least_absolute(examples.reshape(-1, examples.shape[-1]), targets, worth, config.ridge)
    return Trend(
        config=config,
        scale=scale,
        correlation=correlation,
        coefficients=coefficients,
        conformal=Conformal.of(np.zeros((1, root.shape[1]))),
    )


def _least_absolute(examples: Floats, targets: Floats, worth: Floats, ridge: float) -> Floats:
    """Coefficients of the weighted least absolute error, by reweighted least squares."""
    weights = worth
    penalty = ridge * np.eye(examples.shape[1])
    coefficients: Floats = np.zeros(examples.shape[1])
    for _ in range(ROUNDS):
        weighted = examples * weights[:, None]
        coefficients = np.asarray(
            np.linalg.solve(weighted.T @ examples + penalty, weighted.T @ targets), dtype=np.float64
        )
        weights = worth / np.maximum(np.abs(targets - examples @ coefficients), LEAST)
    return coefficients


def features(scaled: Floats, rows: Indices, config: ForecastConfig, correlation: Floats) -> Floats:
    """Features at `rows` of `scaled`, shape `(rows, series, features)`."""
    smooth = _smoothed(scaled, rows, SMOOTHING)
    common = scaled.mean(axis=1, keepdims=True)
    away = scaled[rows] - smooth[SMOOTHING.index(0.3)]
    changes = [scaled[rows - lag] - scaled[rows - lag - 1] for lag in range(LAGS)]
    own = [
        *changes,
        *(scaled[rows] - average for average in smooth),
        *(value * correlation for value in (changes[0], changes[1], away, scaled[rows] - smooth[4])),
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
    columns = [*own, *(np.broadcast_to(column, shape) for column in together), np.ones(shape)]
    table: Floats = np.clip(np.stack(columns, axis=-1), -CLIP, CLIP)
    return table


def _around(values: Floats, rows: Indices) -> Floats:
    """Means of three neighbouring rows, `(rows, series)`; the next row is in the past too, a season ago."""
    return (values[rows - 1] + values[rows] + values[rows + 1]) / 3


def _smoothed(values: Floats, rows: Indices, parts: tuple[float, ...]) -> Floats:
    """Exponential moving averages at `rows`, shape `(parts, rows, series)`.

    It is one product with `(parts, rows, times)` weights: fast for the single row of a forecast, and fast
    enough for fits to hundreds of samples.
    """
    age = rows[:, None] - np.arange(len(values))
    part = np.array(parts)[:, None, None]
    weights = np.where(age >= 0, part * (1 - part) ** np.maximum(age, 0), 0.0)
    weights[:, :, 0] = (1 - part[:, :, 0]) ** rows  # the average starts at the first value
    return weights @ values
