"""Random models on random nodes: no slot beyond its memory, and no search that is worse than no search.

Drawn: 4–24 layers, 2–16 slots of unequal memory and speed, stages and replicas given or not. What a stage
needs is added up here from its layers, not taken from the plan's own forecast, which is compared with it. Not
in either: what a layer that recomputes its activations has at once beside what it keeps. The plan made at
once takes the slots as they come; what it takes on them is computed by the formula of the search. The best
step is asked for, however many slots that takes, for that is what the two are compared in.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.policy_sections.sheet import Bench
from entities.planner.plan_at_once import plan_at_once
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanLayer, PlanRequest, PlanSlot
from entities.planner.search.plan_places import groups_of, kind_of
from entities.planner.search.plan_search import chain_of_request, search_plan, settings_of
from entities.planner.search.step_cost import StepCost
from entities.planner.windows import in_flight

PLANS = 1000


def run(bench: Bench) -> None:
    """Slots with more in them than they have, and steps beside plans made at once, in 1,000 plans."""
    draws = np.random.default_rng(bench.seed)
    planned = refused = beyond = below = at_once_alone = 0
    beside: list[float] = []
    began = time.perf_counter()
    while planned < PLANS and planned + refused < 5 * PLANS:
        request = drawn_request(draws)
        try:
            answer = search_plan(request)
        except NoPlan:
            refused += 1
            at_once_alone += at_once_ms(request) is not None
            continue
        planned += 1
        if (at_once := at_once_ms(request)) is not None:
            beside.append(answer.forecast.step_ms / at_once)
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
    some(beside, "plans that are made at once, too")
    worse = sum(ratio > 1 + 1e-9 for ratio in beside)
    bench.at_most(
        "searched plans with a longer step than the plan at once",
        float(worse),
        0.0,
        note=f"{len(beside)} requests have both",
        mean=float(np.mean(beside)),
        worst=max(beside),
    )
    bench.at_most("plans at once that the search has not found", float(at_once_alone), 0.0)
    bench.at_most("forecasts below what the layers need", float(below), 0.0)


def at_once_ms(request: PlanRequest) -> float | None:
    """The step of the plan made at once on the very slots that it takes, by the search's formula; None: there
    is no such plan."""
    try:
        answer = plan_at_once(request)
    except NoPlan:
        return None
    return step_on_slots_ms(request, answer)


def step_on_slots_ms(request: PlanRequest, answer: PlanAnswer) -> float:
    """What a plan's step takes on the slots of its places, ms."""
    kinds = sorted({kind_of(slot) for slot in request.slots})
    cost = StepCost(chain_of_request(request), kinds, settings_of(request))
    return cost.forecast(list(answer.cuts), groups_of(request, kinds, answer)).step_ms


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
        least_gain=0.0,
        effort=0.1,
    )
