"""Cuts of public graphs beside the solver's bound, the best that is known, and equal shares.

Data: models/dnn_partitioning (Tarnawski et al., 2020), forward and backward of a layer in one stage. The
best known
is what the solver found in its time, or the planner with twenty times as many moves.
"""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.planner_sections.graph_files import PartitioningCase, read_partitioning_case
from benchmarks.planner_sections.optimum import ProvenBound, proven_bound
from benchmarks.policy_data.forms import WrongForm
from benchmarks.policy_sections.sheet import Bench
from entities.planner.search.graph_cut import GraphCutConfig, cut_graph, stage_costs
from entities.planner.search.layer_graph import branch_first_order

OF_BOUND, OF_BEST = 1.005, 1.02


def run(bench: Bench) -> None:
    """One row for each graph."""
    folder = bench.data / "models/dnn_partitioning/throughput-inputs"
    files = sorted(folder.glob("*Graphs/*.json*"))
    if not files:
        raise WrongForm(folder, "no graphs in it")
    for file in files:
        case = read_partitioning_case(file)
        began = time.perf_counter()
        cost, _ = cut_graph(case.graph, case.stages, GraphCutConfig(seed=bench.seed))
        took = time.perf_counter() - began
        proof = _proof(bench, case, cost)
        longer = replace(GraphCutConfig(seed=bench.seed + 1), rounds=40, moves=1200, stale_moves=300)
        best, _ = cut_graph(case.graph, case.stages, longer)
        best = min(cost, best, proof.value if proof and proof.value else cost)
        even = equal_shares(case)
        name = f"{file.parent.name.removesuffix('Graphs').lower()} {file.name.partition('.')[0]}"
        note = f"{case.graph.count} layers, {case.stages} stages, {took:.2f} s"
        if proof is not None and proof.closed:
            bench.at_most(
                f"{name}: of the bound",
                cost / proof.bound,
                OF_BOUND,
                note=note,
                equal_shares=even / proof.bound,
            )
        else:
            note += f"; bound {cost / proof.bound:.3f}" if proof and proof.bound else ""
            bench.at_most(
                f"{name}: of the best known", cost / best, OF_BEST, note=note, equal_shares=even / best
            )
        bench.at_most(f"{name}: of equal shares", cost / even, 1.0)


def equal_shares(case: PartitioningCase) -> float:
    """The costliest stage if layers are cut in branch-first order where the work has equal parts."""
    graph, total, reached = case.graph, sum(case.graph.work_ms), 0.0
    assigned = [0] * graph.count
    for layer in branch_first_order(graph):
        assigned[layer] = min(
            case.stages - 1, int(case.stages * (reached + graph.work_ms[layer] / 2) / total)
        )
        reached += graph.work_ms[layer]
    return max(stage_costs(graph, assigned, case.stages))


def _proof(bench: Bench, case: PartitioningCase, upper: float) -> ProvenBound | None:
    if not bench.solver_s:
        return None
    try:
        return proven_bound(case.graph, case.stages, limit_s=bench.solver_s, upper=upper * 1.0001)
    except ImportError:
        bench.say("scipy is not installed (the extra bench-policies): no bounds")
        return None
