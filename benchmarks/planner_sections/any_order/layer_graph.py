"""A model's layers as a graph: who takes whose output, an order of them, what is alive or sent along it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entities.planner.plan_request import NoPlan
from entities.planner.search.layer_chain import Floats


@dataclass(frozen=True)
class OutputFlow:
    """One output of a layer and who takes it. It travels once to each stage that has some of these."""

    source: int
    size: float
    """Bytes per microbatch, or the milliseconds that their transfer takes."""
    consumers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """Layers 0…n-1 with what each costs per microbatch, and who takes whose output.

    `edges` are the order of computation (first before second); `flows` are what travels, gradients included:
    they may go against the order.
    """

    names: tuple[str, ...]
    work_ms: tuple[float, ...]
    """Forward and backward at reference speed."""
    state_bytes: tuple[float, ...]
    """Whatever the number of microbatches: weights, optimizer, sums, gradients."""
    activation_bytes: tuple[float, ...]
    """Of one microbatch, between its forward and its backward."""
    edges: tuple[tuple[int, int], ...]
    flows: tuple[OutputFlow, ...]

    @property
    def count(self) -> int:
        return len(self.work_ms)


def neighbours(graph: LayerGraph) -> tuple[list[list[int]], list[list[int]]]:
    """(before, after) of each layer by the graph's edges, each in ascending order."""
    before: list[list[int]] = [[] for _ in range(graph.count)]
    after: list[list[int]] = [[] for _ in range(graph.count)]
    for source, target in sorted(set(graph.edges)):
        after[source].append(target)
        before[target].append(source)
    return before, after


def branch_first_order(graph: LayerGraph, shuffle: random.Random | None = None) -> list[int]:
    """An order of computation that ends a branch before it begins the next.

    Args:
        graph: without cycles (`contraction.contract` merges them).
        shuffle: draws which branch comes first; none: the one whose first layer has the lowest number.

    Raises:
        NoPlan: the graph has a cycle; two of its layers are named.
    """
    _, after = neighbours(graph)
    waits = [0] * graph.count
    for targets in after:
        for target in targets:
            waits[target] += 1
    ready = [layer for layer in reversed(range(graph.count)) if not waits[layer]]
    order: list[int] = []
    while ready:
        if shuffle is not None and len(ready) > 1 and shuffle.random() < 0.25:
            at = shuffle.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
        layer = ready.pop()
        order.append(layer)
        opened = []
        for target in after[layer]:
            waits[target] -= 1
            if not waits[target]:
                opened.append(target)
        if shuffle is not None:
            shuffle.shuffle(opened)
        ready.extend(reversed(opened))
    if len(order) < graph.count:
        names = [graph.names[layer] for layer in range(graph.count) if waits[layer]][:2]
        raise NoPlan(
            f"layers {' and '.join(names)} each need the other's output: break the cycle, or tie them"
        )
    return order


def live_bytes(graph: LayerGraph, order: Sequence[int]) -> Floats:
    """What is alive at each edge of an order: outputs made before it and taken after it, `(n+1,)`."""
    position = {layer: at for at, layer in enumerate(order)}
    change = np.zeros(graph.count + 2)
    for flow in graph.flows:
        places = [position[flow.source], *(position[consumer] for consumer in flow.consumers)]
        first, last = min(places), max(places)
        change[first + 1] += flow.size
        change[last + 1] -= flow.size
    live: Floats = change.cumsum()[: graph.count + 1]
    return live


def flows_by_layer(graph: LayerGraph) -> list[list[int]]:
    """The flows that each layer sends or takes, by their place in `graph.flows`."""
    touching: dict[int, list[int]] = defaultdict(list)
    for number, flow in enumerate(graph.flows):
        for layer in {flow.source, *flow.consumers}:
            touching[layer].append(number)
    return [touching[layer] for layer in range(graph.count)]


def interval_transfers(graph: LayerGraph, order: Sequence[int]) -> Floats:
    """`(n+1, n+1)`: at [i, j] what layers i…j-1 of an order send to others and take from others.

    Each output counts once for the stage that sends it and once for each stage that takes it (Tarnawski et
    al., 2020): stages send straight to each other here, and relay nothing.
    """
    count = graph.count
    position = {layer: at for at, layer in enumerate(order)}
    boxes: list[tuple[int, int, int, int, float]] = []  # intervals [i, j): i in low…high, j in low…high

    for flow in graph.flows:
        source = position[flow.source]
        takers = sorted(position[consumer] for consumer in flow.consumers)
        low, high = min(source, takers[0]), max(source, takers[-1])
        boxes.append((0, source, source + 1, count, flow.size))  # has the source, so sends it …
        boxes.append((0, low, high + 1, count, -flow.size))  # … unless all who take it are inside
        before = -1
        for taker in takers:  # the first taker inside is this one: takes it, unless the source is inside, too
            boxes.append((before + 1, taker, taker + 1, count, flow.size))
            boxes.append((before + 1, min(taker, source), max(taker, source) + 1, count, -flow.size))
            before = taker
    change = np.zeros((count + 2, count + 2))
    if boxes:
        corners = np.array(boxes)
        corners = corners[(corners[:, 0] <= corners[:, 1]) & (corners[:, 2] <= corners[:, 3])]
        rows, past_rows = corners[:, 0].astype(int), corners[:, 1].astype(int) + 1
        columns, past_columns = corners[:, 2].astype(int), corners[:, 3].astype(int) + 1
        sizes = corners[:, 4]
        np.add.at(change, (rows, columns), sizes)
        np.add.at(change, (past_rows, columns), -sizes)
        np.add.at(change, (rows, past_columns), -sizes)
        np.add.at(change, (past_rows, past_columns), sizes)
    transfers: Floats = change.cumsum(0).cumsum(1)[: count + 1, : count + 1]
    return np.maximum(transfers, 0.0)
