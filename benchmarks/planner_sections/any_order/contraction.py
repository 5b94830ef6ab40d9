"""Layers that no cut may separate become one: ties, and cycles that ties make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.planner_sections.any_order.layer_graph import LayerGraph, OutputFlow


def contract(
    graph: LayerGraph, ties: Iterable[Sequence[int]] = ()
) -> tuple[LayerGraph, tuple[tuple[int, ...], ...]]:
    """The graph with each tied group, and each cycle, as one layer.

    Args:
        graph: may have cycles.
        ties: groups of layers that have to be in one stage.

    Returns:
        A graph without cycles, and for each of its layers those of the given graph that it stands for, in
        ascending order. Flows inside a group vanish.
    """
    group = _joined(graph.count, ties)
    group = _without_cycles(group, graph.edges)
    numbers: dict[int, int] = {}
    for layer in range(graph.count):
        numbers.setdefault(group[layer], len(numbers))
    home = [numbers[group[layer]] for layer in range(graph.count)]
    members: list[list[int]] = [[] for _ in numbers]
    for layer, number in enumerate(home):
        members[number].append(layer)
    flows = []
    for flow in graph.flows:
        consumers = tuple(sorted({home[consumer] for consumer in flow.consumers} - {home[flow.source]}))
        if consumers:
            flows.append(OutputFlow(home[flow.source], flow.size, consumers))

    def total(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[layer] for layer in group) for group in members)

    contracted = LayerGraph(
        names=tuple("+".join(graph.names[layer] for layer in group[:3]) for group in members),
        work_ms=total(graph.work_ms),
        state_bytes=total(graph.state_bytes),
        activation_bytes=total(graph.activation_bytes),
        edges=tuple(sorted({(home[a], home[b]) for a, b in graph.edges if home[a] != home[b]})),
        flows=tuple(flows),
    )
    return contracted, tuple(map(tuple, members))


def _joined(count: int, ties: Iterable[Sequence[int]]) -> list[int]:
    """The lowest layer of each layer's tied group."""
    parent = list(range(count))

    def root(layer: int) -> int:
        while parent[layer] != layer:
            parent[layer] = layer = parent[parent[layer]]
        return layer

    for tied in ties:
        for layer in tied:
            low, high = sorted((root(tied[0]), root(layer)))
            parent[high] = low
    return [root(layer) for layer in range(count)]


def _without_cycles(group: list[int], edges: Iterable[tuple[int, int]]) -> list[int]:
    """Groups merged along cycles: Tarjan's strongly connected components, without recursion."""
    after: dict[int, set[int]] = defaultdict(set)
    for source, target in edges:
        if group[source] != group[target]:
            after[group[source]].add(group[target])
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    component: dict[int, int] = {}
    path: list[int] = []
    for start in sorted(set(group)):
        if start in index:
            continue
        work = [(start, iter(sorted(after[start])))]
        index[start] = low[start] = len(index)
        path.append(start)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    path.append(target)
                    work.append((target, iter(sorted(after[target]))))
                    break
                if target not in component:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    members = path[path.index(node) :]
                    del path[path.index(node) :]
                    for member in members:
                        component[member] = min(members)
    return [component[number] for number in group]
