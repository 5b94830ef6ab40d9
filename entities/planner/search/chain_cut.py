"""Where to cut a chain of layers: an exact dynamic programme over (edges, stages).

A stage's cost is any function of its first and last edge, given as a matrix, so stages may differ in speed
and memory. The least bottleneck is exact, and so is the least sum of weights among the cuts within a
bottleneck. The work is O(edges² · stages) in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entities.planner.search.layer_chain import Floats

Cuts = list[tuple[int, int]]
"""(first, last) edge of each stage, as indices of the matrices; the last is exclusive."""


def interval_sums(values: Floats) -> Floats:
    """`(n+1, n+1)`: at [i, j] the sum of values i…j-1, for i < j; infinite elsewhere."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = before[None, :] - before[:, None]
    sums[np.tril_indices(len(before))] = np.inf
    return sums


def least_bottleneck(costs: Sequence[Floats]) -> tuple[float, Cuts]:
    """Cuts into `len(costs)` stages, none of them empty, such that the costliest stage costs least.

    Args:
        costs: of each stage: at [i, j] the cost from its i-th first edge to its j-th last one; infinite where
            it may not be. The last edges of a stage are the first ones of the next. The chain begins at the
            first row of the first matrix, and ends at the last column of the last one; all are `(n+1, n+1)`
            where a stage may begin anywhere.

    Returns:
        The cost of the costliest stage, infinite if there is no such cut, and the cuts (then empty).
    """
    least = np.full(costs[0].shape[0], np.inf)
    least[0] = -np.inf
    firsts = []
    for cost in costs:
        work = np.maximum(least[:, None], cost)
        first = work.argmin(0)
        least = work[first, np.arange(cost.shape[1])]
        firsts.append(first)
    return float(least[-1]), traced(firsts) if np.isfinite(least[-1]) else []


def least_sum(weights: Sequence[Floats], costs: Sequence[Floats], bottleneck: float) -> tuple[float, Cuts]:
    """The cuts with the least sum of weights among those whose stages cost at most `bottleneck` each.

    Args:
        weights: of each stage, `(n+1, n+1)`, finite where the cost is.
        costs: as of `least_bottleneck`.
        bottleneck: of the same unit as the costs.

    Returns:
        The sum, infinite if there is no such cut, and the cuts.
    """
    total = np.full(costs[0].shape[0], np.inf)
    total[0] = 0.0
    firsts = []
    for weight, cost in zip(weights, costs, strict=True):
        work = np.where(cost <= bottleneck, weight, np.inf) + total[:, None]
        first = work.argmin(0)
        total = work[first, np.arange(cost.shape[1])]
        firsts.append(first)
    return float(total[-1]), traced(firsts) if np.isfinite(total[-1]) else []


def traced(firsts: Sequence[np.ndarray]) -> Cuts:
    """The cuts of a dynamic programme that noted, stage by stage, the first edge for each last one."""
    cuts: Cuts = []
    last = len(firsts[-1]) - 1
    for first in reversed(firsts):
        cuts.append((int(first[last]), last))
        last = int(first[last])
    cuts.reverse()
    return cuts
