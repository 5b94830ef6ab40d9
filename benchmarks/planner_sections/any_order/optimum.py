"""The least bottleneck of a graph's cut, proven by HiGHS: beside what the search for one finds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.planner_sections.any_order.layer_graph import LayerGraph

GAP = 0.002
"""Relative; within it the bound counts as closed."""


@dataclass(frozen=True)
class ProvenBound:
    """What the solver found in its time. `closed`: value and bound meet."""

    value: float | None
    bound: float
    closed: bool


class _Rows:
    """Linear rows `low ≤ Σ factor · column ≤ high`."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.low), column, factor) for column, factor in terms]
        self.low.append(low)
        self.high.append(high)


def proven_bound(graph: LayerGraph, stages: int, *, limit_s: float, upper: float) -> ProvenBound:
    """Solves the cut as a mixed integer programme.

    Columns: of each layer and stage but the last, whether it is in that stage or an earlier one; of each flow
    and stage, whether it is sent from it and taken by it; the bottleneck.

    Args:
        graph: without cycles.
        stages: at most so many.
        limit_s: seconds for the solver.
        upper: a bottleneck that is known to be possible.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    inside = graph.count * (stages - 1)
    sends, takes = inside, inside + len(graph.flows) * stages
    bottleneck = takes + len(graph.flows) * stages
    rows = _Rows()

    def early(layer: int, stage: int) -> int:
        return layer * (stages - 1) + stage

    def is_in(layer: int, stage: int, factor: float) -> tuple[list[tuple[int, float]], float]:
        """Whether a layer is in a stage, times a factor: columns, and a constant."""
        if stage == 0:
            return [(early(layer, 0), factor)], 0.0
        if stage == stages - 1:
            return [(early(layer, stage - 1), -factor)], factor
        return [(early(layer, stage), factor), (early(layer, stage - 1), -factor)], 0.0

    for layer in range(graph.count):
        for stage in range(stages - 2):
            rows.add([(early(layer, stage + 1), 1.0), (early(layer, stage), -1.0)], 0.0, np.inf)
    for first, second in graph.edges:
        for stage in range(stages - 1):
            rows.add([(early(first, stage), 1.0), (early(second, stage), -1.0)], 0.0, np.inf)
    for number, flow in enumerate(graph.flows):
        for stage in range(stages):
            at = number * stages + stage
            for consumer in flow.consumers:
                for column, mine, theirs in (
                    (sends + at, flow.source, consumer),
                    (takes + at, consumer, flow.source),
                ):
                    plus, base = is_in(mine, stage, 1.0)
                    minus, other = is_in(theirs, stage, -1.0)
                    terms = [(column, 1.0)] + [(at_, -factor) for at_, factor in plus + minus]
                    rows.add(terms, base + other, np.inf)
    for stage in range(stages):
        terms, constant = [(bottleneck, 1.0)], 0.0
        for layer in range(graph.count):
            columns, base = is_in(layer, stage, graph.work_ms[layer])
            terms += [(column, -factor) for column, factor in columns]
            constant += base
        for number, flow in enumerate(graph.flows):
            at = number * stages + stage
            terms += [(sends + at, -flow.size), (takes + at, -flow.size)]
        rows.add(terms, constant, np.inf)
    lines, columns_of, factors = zip(*rows.entries, strict=True)
    matrix = coo_matrix((factors, (lines, columns_of)), shape=(len(rows.low), bottleneck + 1)).tocsr()
    goal = np.zeros(bottleneck + 1)
    goal[bottleneck] = 1.0
    whole = np.zeros(bottleneck + 1)
    whole[:inside] = 1
    most = np.ones(bottleneck + 1)
    most[bottleneck] = upper
    found = milp(
        goal,
        constraints=LinearConstraint(matrix, rows.low, rows.high),
        integrality=whole,
        bounds=Bounds(np.zeros(bottleneck + 1), most),
        options={"time_limit": limit_s, "mip_rel_gap": GAP},
    )
    bound = float(found.mip_dual_bound) if found.mip_dual_bound is not None else 0.0
    value = None if found.x is None else float(found.fun)
    return ProvenBound(value, bound, value is not None and value <= bound * (1 + GAP) + 1e-9)
