"""The best cut for the stages as they are, by the speeds that they show, and what a step takes with it. Pure.

Stages keep their instances, so each has a speed of its own: the sum over its replicas. The least bottleneck
is found by bisection: for one that is given, each stage may end where those before it let it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entities.planner.abandoned_work import stop_if_abandoned
from schemas.recut import Cuts

HALVINGS = 45
"""Of the interval in which the bottleneck is looked for: beyond what measurements are worth."""
CLOSE = 1e-6
"""Bounds are equal if they differ by this share."""


@dataclass(frozen=True, kw_only=True)
class StageSpeeds:
    """The layers' work and the stages' speeds. Milliseconds per microbatch at speed 1.

    `stages`: the speed of each working instance, by stage. `rest_ms`: of a step, beside computing.
    """

    work_ms: Sequence[float]
    stages: Sequence[Sequence[float]]
    microbatches: int
    rest_ms: float = 0.0

    def stage_ms(self, cuts: Cuts) -> tuple[float, ...]:
        """What each stage computes in a step."""
        return tuple(
            self.microbatches * sum(self.work_ms[first:last]) / max(sum(speeds), 1e-9)
            for (first, last), speeds in zip(cuts, self.stages, strict=True)
        )

    def fill_ms(self, cuts: Cuts) -> float:
        """A microbatch through all stages but the slowest, by the fastest instance of each."""
        times = self.stage_ms(cuts)
        worst = times.index(max(times))
        return sum(
            sum(self.work_ms[first:last]) / max(speeds)
            for stage, ((first, last), speeds) in enumerate(zip(cuts, self.stages, strict=True))
            if stage != worst
        )

    def step_ms(self, cuts: Cuts) -> float:
        """What a step takes: the slowest stage, the fill, and the rest."""
        return max(self.stage_ms(cuts)) + self.fill_ms(cuts) + self.rest_ms

    def best(self, edges: Sequence[int]) -> Cuts | None:
        """The cut with the least bottleneck; None: there are fewer pieces than stages.

        Args:
            edges: Where the model may be cut, in front of which layers, ends included.
        """
        if len(edges) - 1 < len(self.stages):
            return None
        work = np.concatenate(([0.0], np.cumsum(self.work_ms)))
        at_edges = work[list(edges)]
        total = float(work[-1])
        low, high = 0.0, total / min(sum(speeds) for speeds in self.stages)
        found = self._within(at_edges, high)
        assert found is not None
        for _ in range(HALVINGS):
            stop_if_abandoned()
            middle = (low + high) / 2
            tried = self._within(at_edges, middle)
            if tried is None:
                low = middle
            else:
                high, found = middle, tried
            if high - low <= CLOSE * high:
                break
        return tuple((edges[first], edges[last]) for first, last in found)

    def _within(self, at_edges: Any, bottleneck: float) -> list[tuple[int, int]] | None:
        """(first, last) edge of each stage, as indices, if none takes longer than `bottleneck`.

        A stage may have to leave layers to a slow one behind it, so all edges where it may end are kept.

        Args:
            at_edges: (edges,) float64: the work in front of each.
            bottleneck: milliseconds.
        """
        end = len(at_edges) - 1
        firsts = np.array([0])
        all_firsts = []
        for speeds in self.stages:
            all_firsts.append(firsts)
            most = bottleneck * sum(speeds) * (1 + 1e-12)
            reach = np.searchsorted(at_edges, at_edges[firsts] + most, side="right") - 1
            steps = np.zeros(end + 2, dtype=np.int64)  # how many firsts reach an edge, as differences
            np.add.at(steps, firsts + 1, 1)
            np.add.at(steps, reach + 1, -1)
            firsts = np.flatnonzero(np.cumsum(steps[: end + 1]) > 0)
        if not len(firsts) or firsts[-1] != end:
            return None
        found = []
        last = end
        for firsts in reversed(all_firsts):  # the latest one before it reaches furthest
            first = int(firsts[np.searchsorted(firsts, last) - 1])
            found.append((first, last))
            last = first
        return found[::-1]
