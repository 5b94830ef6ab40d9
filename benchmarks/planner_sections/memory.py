"""No slot beyond its memory: random models on random nodes, and how many of those refused had no place.

Drawn: 4–24 layers, 2–16 slots of unequal memory and speed, stages and replicas given or not. What a stage
needs is added up here from its layers, not taken from the plan's own forecast, which is compared with it. Not
in either: what a layer that recomputes its activations has at once beside what it keeps.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.policy_sections.sheet import Bench
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.plan_search import search_plan
from entities.planner.windows import in_flight

PLANS = 1000


def run(bench: Bench) -> None:
    """Slots with more in them than they have, in 1,000 plans."""
    draws = np.random.default_rng(bench.seed)
    planned = refused = beyond = below = 0
    began = time.perf_counter()
    while planned < PLANS and planned + refused < 5 * PLANS:
        request = drawn_request(draws)
        try:
            answer = search_plan(request)
        except NoPlan:
            refused += 1
            continue
        planned += 1
        needs = [added_up(request, answer, stage) for stage in range(len(answer.cuts))]
        for place in answer.places:
            room = request.slots[place.slot].memory_bytes
            beyond += bool(room) and needs[place.stage] > room
        below += sum(
            forecast < 0.999 * need
            for need, forecast in zip(needs, answer.forecast.memory_bytes, strict=True)
        )
    some(range(planned), "plans", f"{refused} requests, all refused")
    bench.say(f"{planned} plans, {refused} requests refused, {time.perf_counter() - began:.0f} s")
    bench.at_most("slots beyond their memory", float(beyond), 0.0)
    bench.at_most("forecasts below what the layers need", float(below), 0.0)


def added_up(request: PlanRequest, answer: PlanAnswer, stage: int) -> float:
    """Bytes of an instance: its layers' state; their activations, and what is handed over and back, of each
    microbatch that it may hold (draft §4.5(3))."""
    first, last = answer.cuts[stage]
    flying = min(request.microbatches, in_flight(answer.replicas, stage))
    layers = request.layers[first:last]
    state = sum(layer.state_bytes for layer in layers)
    kept = sum(layer.activation_bytes for layer in layers)
    handed = 2 * layers[-1].output_bytes if last < len(request.layers) else 0.0
    return request.memory_factor * (state + (kept + handed) * flying)


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
