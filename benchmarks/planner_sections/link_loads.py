"""Places on a fat tree and a dragonfly: what the busiest link needs for a step, beside the rule by load
alone.

Hosts of one slot. The rule is the leader's first placement, which knows no links: replica by replica.
"""

from __future__ import annotations

import time

from benchmarks.policy_sections.sheet import Bench
from entities.planner.network_topology import NetworkTopology, dragonfly, fat_tree
from entities.planner.plan_at_once import plan_at_once
from entities.planner.plan_request import PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.link_placement import link_loads
from entities.planner.search.plan_places import link_problem
from entities.planner.search.plan_search import search_plan

SHAPES = ((4, 12), (2, 24), (8, 6))
NETWORKS = {
    "fat tree k=6, 2:1": (fat_tree(6, oversubscription=2.0), 1.0),
    "dragonfly 9×4×2": (dragonfly(9, 4, 2), 0.45),
}


def run(bench: Bench) -> None:
    """A row for each network and shape of job."""
    for name, (topology, bar) in NETWORKS.items():
        for stages, replicas in SHAPES:
            request = _request(topology, stages, replicas, bench.seed)
            began = time.perf_counter()
            answer = search_plan(request)
            took = time.perf_counter() - began
            rule = plan_at_once(request)
            problem = link_problem(request, rule)
            before = float(link_loads(problem, [place.slot for place in rule.places]).max())
            bench.at_most(
                f"{name}, {stages} × {replicas}: of the rule's busiest link",
                answer.forecast.busiest_link_ms / before,
                bar,
                note=f"{answer.forecast.busiest_link_ms:.0f} instead of {before:.0f} ms a step, {took:.1f} s",
            )


def _request(topology: NetworkTopology, stages: int, replicas: int, seed: int) -> PlanRequest:
    """A model of 1e9 parameters, 32 MB at each boundary, 64 microbatches."""
    return PlanRequest(
        layers=tuple(PlanLayer(f"layer-{at}", 50.0, 0.0, 0.0, 8e9 / 24, 32e6) for at in range(24)),
        slots=tuple(PlanSlot(host, "cluster", 0, host=host) for host in topology.hosts),
        clusters=("cluster",),
        microbatches=64,
        stages=stages,
        replicas=(replicas,) * stages,
        hosts=topology.hosts,
        links=tuple((first, second, speed) for (first, second), speed in topology.links.items()),
        seed=seed,
    )
