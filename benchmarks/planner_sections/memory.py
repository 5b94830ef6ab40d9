"""No slot beyond its memory: random models on random nodes, and how many of those refused had no place.

Drawn: 4–24 layers, 2–16 slots of unequal memory and speed, stages and replicas given or not.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.policy_sections.sheet import Bench
from entities.planner.plan_request import NoPlan, PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.plan_search import search_plan

PLANS = 1000


def run(bench: Bench) -> None:
    """Slots with more in them than they have, in 1,000 plans."""
    draws = np.random.default_rng(bench.seed)
    planned = refused = beyond = 0
    began = time.perf_counter()
    while planned < PLANS and planned + refused < 5 * PLANS:
        request = drawn_request(draws)
        try:
            answer = search_plan(request)
        except NoPlan:
            refused += 1
            continue
        planned += 1
        for place in answer.places:
            room = request.slots[place.slot].memory_bytes
            beyond += bool(room) and answer.forecast.memory_bytes[place.stage] > room
    some(range(planned), "plans", f"{refused} requests, all refused")
    bench.say(f"{planned} plans, {refused} requests refused, {time.perf_counter() - began:.0f} s")
    bench.at_most("slots beyond their memory", float(beyond), 0.0)


def drawn_request(draws: np.random.Generator) -> PlanRequest:
    """A job that may or may not fit."""
    layers = int(draws.integers(4, 25))
    count = int(draws.integers(2, 17))
    state = draws.gamma(1.0, 2e8, layers)
    rooms = draws.choice([0, 2**29, 2**30, 2**31], count, p=[0.05, 0.25, 0.4, 0.3])
    stages = int(draws.integers(1, min(layers, count) + 1)) if draws.random() < 0.7 else None
    replicas = None
    if stages is not None and draws.random() < 0.5:
        replicas = (max(1, count // stages - int(draws.integers(0, 2))),) * stages
    return PlanRequest(
        layers=tuple(
            PlanLayer(
                f"layer-{at}", float(draws.gamma(2)), float(state[at]), float(draws.gamma(1, 5e6)), 1e6, 1e5
            )
            for at in range(layers)
        ),
        slots=tuple(
            PlanSlot(
                f"node-{at // 4}",
                f"cluster-{at // 4 % 2}",
                at % 4,
                int(rooms[at]),
                float(draws.choice([0.5, 1, 2])),
            )
            for at in range(count)
        ),
        clusters=("cluster-0", "cluster-1"),
        microbatches=int(draws.choice([4, 8, 16])),
        stages=stages,
        replicas=replicas,
        memory_factor=1.1,
        effort=0.1,
    )
