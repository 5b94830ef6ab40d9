"""What is cut: a model's layers with their costs, as a graph, and as the chain in which they are computed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entities.planner.plan_request import NoPlan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OutputFlow:
    """One output of a layer and the layers that take it. It travels once to each stage that has some of them.
    One output of a layer and the layers that take it. It travels once to each stage that has some of them."""

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


@dataclass(frozen=True, kw_only=True)
class LayerChain:
    """Layers in the order in which they are computed, and what is alive at the edges between them.

    Edge e lies in front of layer e; `crossing_bytes` has one value more than there are layers. A stage relays
    what later stages take of earlier ones, so all that is alive at an edge crosses it, once forward and, as
    gradients, once backward.
    """

    names: tuple[str, ...]
    work_ms: Floats
    state_bytes: Floats
    activation_bytes: Floats
    reduction_bytes: Floats
    """Of a layer's sums, as replicas exchange them at the end of a step."""
    crossing_bytes: Floats
    edges: tuple[int, ...]
    """Where it may be cut, 0 and the number of layers among them."""

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
