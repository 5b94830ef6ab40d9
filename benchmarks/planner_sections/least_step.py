"""The shortest step of all cuts of a chain, and of all ways to give unequal slots to its stages.

Written apart from the planner and without its cost model, so that a bar beside it says something: by the
formula of ADR-0070 alone, one instance for each stage. A step is Σ fill + max over stages (total − fill). For
each bound of the second term the least first one is a shortest path; the bounds are gone through downwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from entities.planner.plan_request import PlanRequest
from entities.planner.search.layer_chain import Floats

Cuts = Sequence[tuple[int, int]]


class ChainSteps:
    """Steps of a request's layers, an instance for each stage.

    Args:
        request: its layers, microbatches and link; everything else is ignored, its constants among it.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.count = len(request.layers)
        before = np.concatenate([[0.0], np.cumsum([layer.work_ms for layer in request.layers])])
        self._work: Floats = before[None, :] - before[:, None]
        self._work[np.tril_indices(self.count + 1)] = np.inf
        live = np.array([request.input_bytes, *(layer.output_bytes for layer in request.layers)])
        live[-1] = 0.0
        per_byte = 1e3 / request.link_bytes_per_s
        self._microbatches = request.microbatches
        self._link_ms: Floats = (live[:, None] + live[None, :]) * (request.microbatches * per_byte)
        self._sent_ms: Floats = 2 * per_byte * live

    def step_ms(self, cuts: Cuts, speeds: Sequence[float]) -> float:
        """What a step takes with these (first, last) layers, on slots of these speeds, a stage each."""
        matrices = [self._matrices(stage, speed) for stage, speed in enumerate(speeds)]
        fills = [fill[cut] for (fill, _), cut in zip(matrices, cuts, strict=True)]
        return float(sum(fills) + max(over[cut] for (_, over), cut in zip(matrices, cuts, strict=True)))

    def least_ms(self, speeds: Sequence[float]) -> float:
        """The shortest step of all cuts and all orders of these slots: exact."""
        best = math.inf
        for order in sorted(set(itertools.permutations(speeds))):
            best = min(best, self._least_of_order(order, best))
        return best

    def _least_of_order(self, speeds: Sequence[float], upper: float) -> float:
        """The shortest step with the slots in this order, or something not below `upper`."""
        matrices = [self._matrices(stage, speed) for stage, speed in enumerate(speeds)]
        lowest = self._least_over([over for _, over in matrices])
        best, bound = upper, math.inf
        while True:
            fill, over = self._least_fill(matrices, bound)
            if not fill + lowest < best:  # no lower bound of `over` has a lower fill
                return best
            best = min(best, fill + over)
            bound = np.nextafter(over, -math.inf)

    def _matrices(self, stage: int, speed: float) -> tuple[Floats, Floats]:
        """(fill, total − fill) of each interval as this stage."""
        fill = self._work / speed
        if stage:
            fill = fill + self._sent_ms[:, None]
        total = np.maximum(self._work * (self._microbatches / speed), self._link_ms)
        over: Floats = np.full_like(total, np.inf)
        np.subtract(total, fill, out=over, where=np.isfinite(fill))
        return fill, over

    def _least_over(self, overs: Sequence[Floats]) -> float:
        """The least max over stages of `total − fill`."""
        least = np.full(self.count + 1, np.inf)
        least[0] = -np.inf
        for over in overs:
            least = np.maximum(least[:, None], over).min(0)
        return float(least[-1])

    def _least_fill(self, matrices: Sequence[tuple[Floats, Floats]], bound: float) -> tuple[float, float]:
        """The least Σ fill of the cuts with `total − fill` ≤ bound, and their largest `total − fill`."""
        sums = np.full(self.count + 1, np.inf)
        sums[0] = 0.0
        firsts = []
        columns = np.arange(self.count + 1)
        for fill, over in matrices:
            reached = np.where(over <= bound, fill, np.inf) + sums[:, None]
            first = reached.argmin(0)
            sums = reached[first, columns]
            firsts.append(first)
        if not np.isfinite(sums[-1]):
            return math.inf, math.inf
        last, largest = self.count, -math.inf
        for (_, over), first in zip(reversed(matrices), reversed(firsts), strict=True):
            largest = max(largest, float(over[first[last], last]))
            last = int(first[last])
        return float(sums[-1]), largest
