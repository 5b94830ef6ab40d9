"""Whether series can be forecast from their own past at all: the Ljung–Box test over a panel (pure).

G. M. Ljung, G. E. P. Box: On a measure of lack of fit in time series models, Biometrika 65 (1978). A series
without serial correlation has no better forecast than its own distribution; a model fitted to it only repeats
noise. So a forecasting policy tests first and makes no forecast then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.numerics.features import Floats

LAGS = 10
NORMAL_99 = 2.326
"""The 99 % quantile of the standard normal distribution."""
ENOUGH_SERIES = 0.5
"""Share of the series that must be correlated."""
ENOUGH_CORRELATION = 0.3
"""Median lag-1 autocorrelation below which last values hold almost no information: r² under a tenth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SerialCorrelation:
    """The result of the test.

    Attributes:
        first: Median over series of the lag-1 autocorrelation.
        correlated: Share of the series for which Ljung–Box rejects independence at 1 %.
    """

    first: float
    correlated: float

    @property
    def forecastable(self) -> bool:
        return self.correlated >= ENOUGH_SERIES and self.first >= ENOUGH_CORRELATION

    def __str__(self) -> str:
        verdict = "may be forecast" if self.forecastable else "not to be forecast"
        return (
            f"median lag-1 autocorrelation {self.first:.2f}, {self.correlated:.0%} of the series serially "
            f"correlated (Ljung–Box, {LAGS} lags, 1 %): {verdict}"
        )


def serial_correlation(values: Floats) -> SerialCorrelation:
    """Tests the series in the columns of `values`, shape `(times, series)`; constant ones are left out."""
    times = len(values)
    if times <= 2 * LAGS:
        return SerialCorrelation(first=0.0, correlated=0.0)
    centred = values - values.mean(axis=0)
    power = (centred**2).sum(axis=0)
    centred, power = centred[:, power > 0], power[power > 0]
    if not power.size:
        return SerialCorrelation(first=0.0, correlated=0.0)
    lagged = [(centred[lag:] * centred[:-lag]).sum(axis=0) / power for lag in range(1, LAGS + 1)]
    statistic = times * (times + 2) * sum(r**2 / (times - lag) for lag, r in enumerate(lagged, 1))
    # Wilson and Hilferty's approximation of the chi-squared quantile; within 0.5 % for these degrees.
    width = 2 / (9 * LAGS)
    critical = LAGS * (1 - width + NORMAL_99 * width**0.5) ** 3
    return SerialCorrelation(
        first=float(np.median(lagged[0])), correlated=float(np.mean(statistic > critical))
    )
