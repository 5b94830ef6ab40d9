"""Where to cut a graph with branches: the exact chain cut of some orders, then tabu on the assignment.

Stages send straight to each other: a stage costs its layers' time and the transfers of what it sends and
takes (Tarnawski et al., 2020). An assignment is legal where no layer is in an earlier stage than one that
it needs; so it is contiguous in some order, and each round ends with the exact cut of that order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planner_sections.any_order.layer_graph import (
    LayerGraph,
    branch_first_order,
    flows_by_layer,
    interval_transfers,
    neighbours,
)
from entities.planner.search.chain_cut import Cuts, interval_sums, traced
from entities.planner.search.layer_chain import Floats


@dataclass(frozen=True, kw_only=True)
class GraphCutConfig:
    """How long is searched, in moves and not by the clock: the same input gives the same cut everywhere."""

    orders: int = 4
    """Orders whose exact cut is made: the branch-first one, and shuffled ones."""
    rounds: int = 6
    """Tabu, then the exact cut of the order that it led to."""
    moves: int = 400
    """Of a round, at most."""
    stale_moves: int = 120
    """A round ends after so many without a better assignment."""
    candidates: int = 160
    """Moves that are weighed for each that is made."""
    tenure: int = 8
    """For so many moves, and up to twice as many, a layer does not go back."""
    seed: int = 0


def cut_graph(
    graph: LayerGraph, stages: int, config: GraphCutConfig = GraphCutConfig()
) -> tuple[float, list[int]]:
    """Assigns layers to at most `stages` stages so that the costliest stage costs least.

    Args:
        graph: without cycles; its flows' sizes are in the unit of its `work_ms`.
        stages: how many there may be.
        config: how long to search.

    Returns:
        The costliest stage's cost, and the stage of each layer.
    """
    draws = random.Random(config.seed)
    orders = [branch_first_order(graph)]
    orders += [branch_first_order(graph, draws) for _ in range(config.orders - 1)]
    cuts = sorted((_cut_of_order(graph, order, stages) for order in orders), key=lambda cut: cut[0])
    best, assigned = cuts[0]
    for number in range(config.rounds if stages > 1 else 0):
        start = assigned if number < config.rounds - len(cuts) + 1 else cuts[number - config.rounds][1]
        cost, found = _StageSearch(graph, stages, start, draws, config).run()
        recut = _cut_of_order(graph, _order_of(graph, found), stages)
        cost, found = min((cost, found), recut, key=lambda cut: cut[0])
        if cost < best:
            best, assigned = cost, found
    return best, assigned


def stage_costs(graph: LayerGraph, assigned: Sequence[int], stages: int) -> list[float]:
    """What each stage of an assignment costs."""
    costs = [0.0] * stages
    for layer, stage in enumerate(assigned):
        costs[stage] += graph.work_ms[layer]
    for flow in graph.flows:
        source = assigned[flow.source]
        for stage in (others := {assigned[consumer] for consumer in flow.consumers} - {source}):
            costs[stage] += flow.size
        if others:
            costs[source] += flow.size
    return costs


def least_bottlenecks(cost: Floats, stages: int) -> list[tuple[float, Cuts]]:
    """`chain_cut.least_bottleneck` for 1…`stages` stages of equal cost, in one pass."""
    size = cost.shape[0]
    columns = np.arange(size)
    least = np.full(size, np.inf)
    least[0] = 0.0
    work = np.empty((size, size))
    firsts: list[np.ndarray] = []
    found: list[tuple[float, Cuts]] = []
    for _ in range(stages):
        np.maximum(least[:, None], cost, out=work)
        first = work.argmin(0)
        least = work[first, columns]
        firsts.append(first)
        found.append((float(least[-1]), traced(firsts) if np.isfinite(least[-1]) else []))
    return found


def _cut_of_order(graph: LayerGraph, order: Sequence[int], stages: int) -> tuple[float, list[int]]:
    costs = interval_sums(np.array([graph.work_ms[layer] for layer in order]))
    costs += interval_transfers(graph, order)
    bottleneck, cuts = min(least_bottlenecks(costs, stages), key=lambda found: found[0])
    assigned = [0] * graph.count
    for stage, (first, last) in enumerate(cuts):
        for layer in order[first:last]:
            assigned[layer] = stage
    return bottleneck, assigned


def _order_of(graph: LayerGraph, assigned: Sequence[int]) -> list[int]:
    """A branch-first order in which each stage is contiguous."""
    place = {layer: at for at, layer in enumerate(branch_first_order(graph))}
    return sorted(range(graph.count), key=lambda layer: (assigned[layer], place[layer]))


class _StageSearch:
    """Tabu on the stages of layers: the move that leaves the least bottleneck, seldom back where it was."""

    def __init__(
        self,
        graph: LayerGraph,
        stages: int,
        start: Sequence[int],
        draws: random.Random,
        config: GraphCutConfig,
    ) -> None:
        self._graph, self._stages, self._draws, self._config = graph, stages, draws, config
        self._before, self._after = neighbours(graph)
        self._flows = flows_by_layer(graph)
        self._assigned = list(start)
        self._costs = stage_costs(graph, start, stages)
        self._best = max(self._costs)
        self._until: dict[tuple[int, int], int] = {}

    def run(self) -> tuple[float, list[int]]:
        best, stale = list(self._assigned), 0
        for move in range(self._config.moves):
            choice = self._choose(move)
            if choice is None:
                self._until.clear()
                stale += 1
            else:
                layer, stage, change = choice
                back = move + self._config.tenure + self._draws.randrange(self._config.tenure + 1)
                self._until[layer, self._assigned[layer]] = back
                self._assigned[layer] = stage
                for at, difference in change.items():
                    self._costs[at] += difference
                if max(self._costs) < self._best - 1e-9:
                    self._best, best, stale = max(self._costs), list(self._assigned), 0
                else:
                    stale += 1
            if stale > self._config.stale_moves:
                break
        return max(stage_costs(self._graph, best, self._stages)), best

    def _choose(self, move: int) -> tuple[int, int, dict[int, float]] | None:
        chosen, least = None, (float("inf"), float("inf"), float("inf"))
        for layer, stage in self._candidates():
            change = self._change(layer, stage)
            costs = [cost + change.get(at, 0.0) for at, cost in enumerate(self._costs)]
            top = sorted(costs, reverse=True)[:3]
            key = (top[0], top[1], top[2] if len(top) > 2 else 0.0)
            aspires = key[0] < self._best - 1e-9
            if (aspires or self._until.get((layer, stage), -1) < move) and key < least:
                chosen, least = (layer, stage, change), key
        return chosen

    def _candidates(self) -> list[tuple[int, int]]:
        """Legal moves to the next stage on either side, those of the costliest stage first."""
        hot = max(range(self._stages), key=self._costs.__getitem__)
        first: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for layer, at in enumerate(self._assigned):
            lowest = max((self._assigned[other] for other in self._before[layer]), default=0)
            highest = min((self._assigned[other] for other in self._after[layer]), default=self._stages - 1)
            for stage in (at - 1, at + 1):
                if lowest <= stage <= highest:
                    (first if hot in (at, stage) else others).append((layer, stage))
        room = max(self._config.candidates // 4, self._config.candidates - len(first))
        if len(first) > self._config.candidates:
            first = self._draws.sample(first, self._config.candidates)
        if len(others) > room:
            others = self._draws.sample(others, room)
        return first + others

    def _change(self, layer: int, stage: int) -> dict[int, float]:
        """By how much each stage's cost changes if a layer goes to a stage."""
        at = self._assigned[layer]
        work = self._graph.work_ms[layer]
        change = {at: -work, stage: work}
        for sign in (-1.0, 1.0):
            if sign > 0:
                self._assigned[layer] = stage
            for number in self._flows[layer]:
                flow = self._graph.flows[number]
                source = self._assigned[flow.source]
                others = {self._assigned[consumer] for consumer in flow.consumers}
                others.discard(source)
                if others:
                    change[source] = change.get(source, 0.0) + sign * flow.size
                    for other in others:
                        change[other] = change.get(other, 0.0) + sign * flow.size
        self._assigned[layer] = at
        return change
