"""Calibrated intervals and probabilities from residuals that a model has not seen (pure).

Split conformal prediction: J. Lei et al., Distribution-Free Predictive Inference for Regression, JASA 113
(2018). The residuals of a calibration part, each in units of its series' usual residual, are the distribution
of the next residual. As long as the calibration part is exchangeable with the following values, an interval
of coverage c holds the truth with probability c, however good the model is. Drift violates that; the
benchmark prints the resulting coverage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.numerics.features import Floats

OWN_RESIDUALS = 20.0
"""Number of own residuals from which a series' own spread outweighs that of all series."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conformal:
    """The distribution of residuals.

    Attributes:
        spread: Usual absolute residual of each series, shape `(series,)`.
        residuals: Sorted residuals of all series together, in units of `spread`.
    """

    spread: Floats
    residuals: Floats

    @staticmethod
    def of(residuals: Floats) -> Conformal:
        """From residuals (truth - forecast) of a calibration part, shape `(times, series)`.

        Raises:
            ValueError: There are none.
        """
        if not residuals.size:
            raise ValueError("no residuals to calibrate with")
        size = np.abs(residuals)
        count = len(residuals)
        spread = (count * size.mean(axis=0) + OWN_RESIDUALS * size.mean()) / (count + OWN_RESIDUALS)
        spread = np.maximum(spread, 1e-12)
        return Conformal(spread=spread, residuals=np.sort((residuals / spread).ravel()))

    def interval(self, forecast: Floats, coverage: float) -> tuple[Floats, Floats]:
        """Lower and upper ends around a forecast, shapes as `forecast`: `(…, series)`."""
        count = self.residuals.size
        tail = (1 - coverage) / 2
        # (n + 1)(1 - tail) is the finite-sample correction, which makes the coverage a lower bound.
        rank = min(1.0, np.ceil((count + 1) * (1 - tail)) / count)
        low, high = np.quantile(self.residuals, (1 - rank, rank))
        return forecast + low * self.spread, forecast + high * self.spread

    def above(self, forecast: Floats, threshold: Floats) -> Floats:
        """The probability that the truth is above `threshold`, shape as `forecast`."""
        gap = (threshold - forecast) / self.spread
        count = self.residuals.size
        # Linear between two residuals, so that a panel has no ties.
        rank = np.interp(gap, self.residuals, (np.arange(count) + 0.5) / count, left=-1.0, right=2.0)
        # Beyond all residuals, the probability decreases with the gap.
        below = 0.5 / count * np.exp(np.minimum(0.0, gap - self.residuals[0]))
        beyond = 1 - 0.5 / count * np.exp(np.minimum(0.0, self.residuals[-1] - gap))
        return 1 - np.where(rank < 0, below, np.where(rank > 1, beyond, rank))
