"""Layer graphs of public data: dnn-partitioning (Tarnawski et al., 2020) and PipeDream's profiles."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planner_sections.any_order.contraction import contract
from benchmarks.planner_sections.any_order.layer_graph import (
    LayerGraph,
    OutputFlow,
    branch_first_order,
    live_bytes,
)
from benchmarks.policy_data.forms import WrongForm, read_json, read_text
from entities.planner.plan_request import PlanLayer
from entities.planner.search.layer_chain import Floats, LayerChain

PROFILE = re.compile(
    r"(\S+) -- .* -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), "
    r"activation_size=([\[\]\d., ;]+), parameter_size=([\d.]+)"
)


@dataclass(frozen=True)
class PartitioningCase:
    """A graph without cycles, and into how many stages it is to be cut. Transfers are milliseconds."""

    graph: LayerGraph
    stages: int


def read_partitioning_case(path: Path) -> PartitioningCase:
    """A file of dnn-partitioning: forward and backward of a layer (`colorClass`) are one; so are cycles.

    Raises:
        WrongForm: missing, or of another form.
    """
    body = read_json(path)
    try:
        return _partitioning_case(body)
    except (KeyError, TypeError, IndexError) as error:
        raise WrongForm(path, f"not a graph of dnn-partitioning: {error!r}") from error


def _partitioning_case(body: dict[str, object]) -> PartitioningCase:
    nodes: list[dict[str, object]] = body["nodes"]  # type: ignore[assignment]
    links: list[dict[str, object]] = body["edges"]  # type: ignore[assignment]
    number = {node["id"]: at for at, node in enumerate(nodes)}
    backward = [bool(node["isBackwardNode"]) for node in nodes]
    colour = [
        node["colorClass"] if node.get("colorClass") is not None else ("own", at)
        for at, node in enumerate(nodes)
    ]
    beside: dict[int, list[int]] = defaultdict(list)
    takers: dict[int, set[int]] = defaultdict(set)
    cost: dict[int, float] = {}
    order = []
    for link in links:
        source, target = number[link["sourceId"]], number[link["destId"]]
        beside[source].append(target)
        beside[target].append(source)
        takers[source].add(target)
        cost[source] = float(link["cost"])  # type: ignore[arg-type]
        if not backward[source] and not backward[target]:
            order.append((source, target))
    forward = {colour[at] for at in range(len(nodes)) if not backward[at]}
    changed = True
    while changed:  # a backward node without a forward partner goes with a neighbour
        changed = False
        for at in range(len(nodes)):
            if colour[at] not in forward:
                partner = next((other for other in beside[at] if colour[other] in forward), None)
                if partner is not None:
                    colour[at], changed = colour[partner], True
    ties: dict[object, list[int]] = defaultdict(list)
    for at, name in enumerate(colour):
        ties[name].append(at)
    graph = LayerGraph(
        names=tuple(str(node["id"]) for node in nodes),
        work_ms=tuple(float(node["fpgaLatency"]) for node in nodes),  # type: ignore[arg-type]
        state_bytes=tuple(float(node["size"]) for node in nodes),  # type: ignore[arg-type]
        activation_bytes=(0.0,) * len(nodes),
        edges=tuple(order),
        flows=tuple(
            OutputFlow(source, cost[source], tuple(sorted(targets))) for source, targets in takers.items()
        ),
    )
    if not graph.names or not any(graph.work_ms):
        raise KeyError("nodes with a cost")
    contracted, _ = contract(graph, ties.values())
    return PartitioningCase(contracted, int(body["maxFPGAs"]))  # type: ignore[call-overload]


def read_profile(path: Path, *, layers: int | None = None) -> LayerChain:
    """A profile of PipeDream in branch-first order; with `layers`, merged into about so many of equal work.

    State is 28 bytes for each parameter of 4, as training with AdamW and exact sums takes.

    Raises:
        WrongForm: missing, or of another form.
    """
    names: list[str] = []
    values: list[tuple[float, float, float]] = []
    arrows = []
    for line_number, line in enumerate(read_text(path).splitlines(), 1):
        if line.startswith("\t"):
            arrows.append(line.strip().split(" -- ")[:2])
        elif line.strip():
            found = PROFILE.match(line)
            if found is None:
                raise WrongForm(path, "not a node of a PipeDream profile", line=line_number)
            kept = sum(float(size) for size in re.split(r"[;, ]+", found[4].strip("[]")) if size)
            names.append(found[1])
            values.append((float(found[2]) + float(found[3]), kept, float(found[5])))
    if not names:
        raise WrongForm(path, "no node in it")
    at = {name: index for index, name in enumerate(names)}
    edges = tuple((at[source], at[target]) for source, target in arrows)
    takers: dict[int, set[int]] = defaultdict(set)
    for source, target in edges:
        takers[source].add(target)
    graph = LayerGraph(
        names=tuple(names),
        work_ms=tuple(work for work, _, _ in values),
        state_bytes=tuple(7 * parameters for _, _, parameters in values),
        activation_bytes=tuple(kept for _, kept, _ in values),
        edges=edges,
        flows=tuple(
            OutputFlow(source, values[source][1], tuple(sorted(targets)))
            for source, targets in takers.items()
        ),
    )
    order = branch_first_order(graph)
    columns = np.array(values)[order]
    return _merged(columns, live_bytes(graph, order), [names[layer] for layer in order], layers)


def _merged(columns: Floats, live: Floats, names: list[str], layers: int | None) -> LayerChain:
    count = len(columns)
    edges = np.arange(count + 1)
    if layers is not None:
        work = columns[:, 0] + 1e-6 * columns[:, 0].sum()
        inner = np.unique(
            np.searchsorted(np.cumsum(work), np.linspace(0, columns[:, 0].sum(), layers + 1)[1:-1])
        )
        edges = np.array([0, *inner[(inner > 0) & (inner < count)], count])
    sums = np.add.reduceat(columns, edges[:-1], axis=0)
    return LayerChain(
        names=tuple(names[first] for first in edges[:-1]),
        work_ms=sums[:, 0],
        state_bytes=7 * sums[:, 2],
        activation_bytes=sums[:, 1],
        reduction_bytes=2 * sums[:, 2],
        crossing_bytes=live[edges],
        edges=tuple(range(len(edges))),
    )


def planned_layers(chain: LayerChain) -> tuple[PlanLayer, ...]:
    """The layers of a chain as a request has them."""
    columns = (
        chain.work_ms,
        chain.state_bytes,
        chain.activation_bytes,
        chain.reduction_bytes,
        chain.crossing_bytes[1:],
    )
    rows = zip(*(map(float, column) for column in columns), strict=True)
    return tuple(PlanLayer(name, *row) for name, row in zip(chain.names, rows, strict=True))
