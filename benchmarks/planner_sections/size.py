"""Large models and many units: seconds.

The product's search on a drawn chain of 1,251 layers whose outputs skip up to forty layers: 8 stages on
slots of one speed and on slots of four, 64 stages; 10,000 units placed on 1,251 nodes of eight slots; the
plan at once that the leader may make on its own loop.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.planner_sections.any_order.layer_graph import LayerGraph, OutputFlow
from benchmarks.planner_sections.cuts import request_of_order
from benchmarks.policy_sections.sheet import Bench
from entities.planner.first_placement import NeededPlace, NodeRoom, place_first
from entities.planner.plan_at_once import is_small, plan_at_once
from entities.planner.plan_request import PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.plan_search import search_plan

LAYERS = 1251


def run(bench: Bench) -> None:
    """Rows of seconds."""
    draws = np.random.default_rng(bench.seed)
    graph = drawn_graph(draws, LAYERS)
    order = list(range(graph.count))
    unequal = (0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0)
    for name, speeds in (("", (1.0,) * 8), (" of unequal slots", unequal), ("", (1.0,) * 64)):
        request = request_of_order(graph, order, speeds)
        began = time.perf_counter()
        search_plan(request)
        took = time.perf_counter() - began
        title = f"search, {LAYERS} layers, {len(speeds)} stages{name}"
        if speeds == (1.0,) * 8:
            bench.at_most(title, took, 2.0, unit="s")
        else:
            bench.told(title, took, unit="s")
    for count in (512, 10_000):
        units = [NeededPlace(stage, replica, 10**9) for stage in range(8) for replica in range(count // 8)]
        nodes = [
            NodeRoom(
                f"node-{number:05}", f"cluster-{number % 4}", tuple((slot, 2 * 10**9) for slot in range(8))
            )
            for number in range(count // 8 + 1)
        ]
        began = time.perf_counter()
        place_first(units, nodes, [f"cluster-{number}" for number in range(4)])
        took = time.perf_counter() - began
        if count == 512:
            bench.at_most(f"{count} units placed", 1e3 * took, 20.0, unit="ms")
        else:
            bench.at_most(f"{count} units placed", took, 5.0, unit="s")
    _at_once(bench, draws)


def _at_once(bench: Bench, draws: np.random.Generator) -> None:
    """What the leader computes on its own loop: the largest job that it plans itself, and one to fall back
    on."""
    for layers, stages, replicas in ((54, 8, 32), (1250, 8, 64)):
        request = PlanRequest(
            layers=tuple(
                PlanLayer(f"layer-{at}", float(draws.gamma(2)), 1e6, 1e5, 1e6, 1e4) for at in range(layers)
            ),
            slots=tuple(
                PlanSlot(f"node-{at // 8:03}", f"cluster-{at // 8 % 4}", at % 8) for at in range(640)
            ),
            clusters=tuple(f"cluster-{number}" for number in range(4)),
            microbatches=64,
            stages=stages,
            replicas=(replicas,) * stages,
        )
        took = []
        for _ in range(5):
            began = time.perf_counter()
            plan_at_once(request)
            took.append(1e3 * (time.perf_counter() - began))
        how = "exact" if is_small(request) else "to fall back on"
        bench.at_most(
            f"plan at once, {layers} layers, {stages * replicas} units", min(took), 20.0, unit="ms", note=how
        )


def drawn_graph(draws: np.random.Generator, count: int) -> LayerGraph:
    """A graph in order, with outputs that up to three of the next forty layers take."""
    flows = []
    for layer in range(count - 1):
        takers = draws.integers(layer + 1, min(count, layer + 40), draws.integers(1, 4))
        flows.append(
            OutputFlow(layer, float(draws.random()), tuple(sorted({int(taker) for taker in takers})))
        )
    return LayerGraph(
        names=tuple(map(str, range(count))),
        work_ms=tuple(map(float, draws.gamma(1, size=count))),
        state_bytes=(0.0,) * count,
        activation_bytes=(0.0,) * count,
        edges=tuple((flow.source, taker) for flow in flows for taker in flow.consumers),
        flows=tuple(flows),
    )
