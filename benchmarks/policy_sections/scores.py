"""Scores that several sections print: ranking, calibration, error. Plain numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.emptiness import NothingMeasured, both_classes, some

Floats = NDArray[np.float64]


def auroc(scores: Floats, truth: NDArray[np.bool_]) -> float:
    """Area under the ROC curve of all entries together, ties counted half.

    Raises:
        NothingMeasured: One class is missing.
    """
    flat, positive = scores.ravel(), truth.ravel()
    both_classes(positive, "scored entries")
    _, place, count = np.unique(flat, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def brier(probability: Floats, truth: NDArray[np.bool_]) -> float:
    """Mean squared error of the probability.

    Raises:
        NothingMeasured: There is no entry.
    """
    some(probability.ravel(), "scored entries")
    return float(np.mean((probability - truth) ** 2))


def calibration_error(probability: Floats, truth: NDArray[np.bool_], bins: int = 10) -> float:
    """Expected calibration error: |mean probability - frequency| over bins of equal width.

    Raises:
        NothingMeasured: There is no entry.
    """
    flat, positive = some(probability.ravel(), "scored entries"), truth.ravel()
    which = np.minimum((flat * bins).astype(int), bins - 1)
    gaps = [abs(float(flat[which == each].sum() - positive[which == each].sum())) for each in range(bins)]
    return sum(gaps) / flat.size


def error_ratio(forecast: Floats, naive: Floats, truth: Floats) -> float:
    """MASE, with the naive forecast's error on the same part as its scale.

    Raises:
        NothingMeasured: The naive forecast has no error, so that nothing is to forecast.
    """
    scale = float(np.abs(naive - truth).sum())
    if not scale > 0:
        raise NothingMeasured("no change of what is forecast")
    return float(np.abs(forecast - truth).sum() / scale)
