"""What a step's reduced gradient is multiplied by: the ledger decides it, and `dmsc check` tries it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable


def gradient_scale(
    squared_norms: Iterable[float], microbatches: int, weight: float, clip_norm: float | None
) -> tuple[float, float]:
    """The norm of the whole gradient, and the factor that `clip_norm` and the losses' weight make.

    Instances hold the gradient's mean over the microbatches; it shall be that over their weight.

    Args:
        squared_norms: Of each parameter, in stage order. They are added one by one in float64, which is the
            same sum for any cut.
        microbatches: How many there are.
        weight: What their losses are divided by together; 0: no target counted.
        clip_norm: The job's `training.clip_norm`.

    Returns:
        (norm, factor); a norm that is not finite is not clipped.
    """
    squared = 0.0
    for value in squared_norms:
        squared += value
    factor = microbatches / weight if weight else 1.0
    norm = factor * math.sqrt(squared) if squared >= 0 else math.nan
    if clip_norm is not None and clip_norm < norm < math.inf:
        factor *= clip_norm / (norm + 1e-6)
    return norm, factor
