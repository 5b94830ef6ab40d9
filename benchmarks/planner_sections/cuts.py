"""What the product's search cuts of public graphs, beside the shortest step of all cuts.

Data: models/dnn_partitioning (Tarnawski et al., 2020), forward and backward of a layer in one stage, in the
order in which they are computed. Each graph is planned twice, an instance for each stage: on slots of one
speed, and on slots of drawn speeds. The least step is exact (`least_step`): all cuts of the order, and all
ways to give the slots to stages.

Beside that, without a bar, what the graph could gain if its layers might be in any order (`any_order`): the
costliest stage of the product's cut, of that of the best assignment that is known, and the solver's bound.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np

from benchmarks.planner_sections.any_order.graph_cut import GraphCutConfig, cut_graph, stage_costs
from benchmarks.planner_sections.any_order.layer_graph import LayerGraph, branch_first_order, live_bytes
from benchmarks.planner_sections.any_order.optimum import ProvenBound, proven_bound
from benchmarks.planner_sections.graph_files import PartitioningCase, read_partitioning_case
from benchmarks.planner_sections.least_step import ChainSteps, Cuts
from benchmarks.policy_data.forms import WrongForm
from benchmarks.policy_sections.sheet import Bench
from entities.planner.plan_request import PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.plan_search import search_plan

OF_LEAST = 1.005
MICROBATCHES = 32
BYTES_PER_MS = 1e6
"""Of the request's link: transfers of the files are milliseconds."""


def run(bench: Bench) -> None:
    """Rows for each graph."""
    folder = bench.data / "models/dnn_partitioning/throughput-inputs"
    files = sorted(folder.glob("*Graphs/*.json*"))
    if not files:
        raise WrongForm(folder, "no graphs in it")
    draws = np.random.default_rng(bench.seed)
    for file in files:
        case = read_partitioning_case(file)
        name = f"{file.parent.name.removesuffix('Graphs').lower()} {file.name.partition('.')[0]}"
        order = branch_first_order(case.graph)
        drawn = tuple(map(float, draws.choice([0.5, 1.0, 2.0], case.stages)))
        alike = _planned(bench, name, case, order, (1.0,) * case.stages)
        _planned(bench, f"{name}, speeds {', '.join(f'{speed:g}' for speed in drawn)}", case, order, drawn)
        _any_order(bench, name, case, order, alike)


def _planned(
    bench: Bench, name: str, case: PartitioningCase, order: list[int], speeds: tuple[float, ...]
) -> Cuts:
    """The search's cut of an order on slots of these speeds, beside the least step and equal shares."""
    request = request_of_order(case.graph, order, speeds)
    began = time.perf_counter()
    answer = search_plan(request)
    took = time.perf_counter() - began
    steps = ChainSteps(request)
    placed = [request.slots[place.slot].speed for place in answer.places]
    step = steps.step_ms(answer.cuts, placed)
    even = steps.step_ms(equal_shares(request, speeds), speeds)
    least = steps.least_ms(speeds)
    bench.at_most(
        f"{name}: of the least step",
        step / least,
        OF_LEAST,
        note=f"{len(order)} layers, {case.stages} stages, {took:.2f} s",
        equal_shares=even / least,
        forecast=answer.forecast.step_ms / step,
    )
    bench.at_most(f"{name}: of equal shares", step / even, 1.0)
    return answer.cuts


def request_of_order(graph: LayerGraph, order: list[int], speeds: tuple[float, ...]) -> PlanRequest:
    """A job of the graph's layers in this order, with a stage for each slot, and no constant time."""
    live = live_bytes(graph, order)
    return PlanRequest(
        layers=tuple(
            PlanLayer(graph.names[layer], graph.work_ms[layer], 0.0, 0.0, 0.0, float(live[at]) * BYTES_PER_MS)
            for at, layer in enumerate(order, 1)
        ),
        slots=tuple(PlanSlot("node", "cluster", at, speed=speed) for at, speed in enumerate(speeds)),
        clusters=("cluster",),
        microbatches=MICROBATCHES,
        stages=len(speeds),
        replicas=(1,) * len(speeds),
        link_bytes_per_s=1e3 * BYTES_PER_MS,
        hop_ms=0.0,
    )


def equal_shares(request: PlanRequest, speeds: tuple[float, ...]) -> Cuts:
    """Cuts where each slot, as they come, has its share of the work, as nearly as the layers let it."""
    reached = np.concatenate([[0.0], np.cumsum([layer.work_ms for layer in request.layers])])
    shares = np.cumsum(speeds)[:-1] / sum(speeds) * reached[-1]
    edges = [0]
    for stage, share in enumerate(shares, 1):
        last = len(reached) - 1 - (len(speeds) - stage)
        nearest = int(np.abs(reached - share).argmin())
        edges.append(min(max(nearest, edges[-1] + 1), last))
    return list(pairwise([*edges, len(reached) - 1]))


def _any_order(bench: Bench, name: str, case: PartitioningCase, order: list[int], cuts: Cuts) -> None:
    """What the linear order costs: stages that send straight to each other, in one order and in any."""
    graph, stages = case.graph, case.stages
    assigned = [0] * graph.count
    for stage, (first, last) in enumerate(cuts):
        for layer in order[first:last]:
            assigned[layer] = stage
    mine = max(stage_costs(graph, assigned, stages))
    best, _ = cut_graph(graph, stages, GraphCutConfig(seed=bench.seed))
    longer = replace(GraphCutConfig(seed=bench.seed + 1), rounds=40, moves=1200, stale_moves=300)
    best = min(best, cut_graph(graph, stages, longer)[0])
    proof = _proof(bench, case, min(best, mine))
    note = ""
    if proof is not None and proof.bound:
        note = f"solver's bound {proof.bound / best:.3f}{', closed' if proof.closed else ''}"
    bench.told(f"{name}: costliest stage, of that in any order", mine / best, note=note)


def _proof(bench: Bench, case: PartitioningCase, upper: float) -> ProvenBound | None:
    if not bench.solver_s:
        return None
    try:
        return proven_bound(case.graph, case.stages, limit_s=bench.solver_s, upper=upper * 1.0001)
    except ImportError:
        bench.say("scipy is not installed (the extra bench-policies): no bounds")
        return None
