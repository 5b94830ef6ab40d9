"""The best plan that is found for a request, with the three best others and why not (ADR-0070).

For each number of stages the instances are assigned by tabu, each assignment judged by its exact cut. The
best ones are searched longer. Then units get slots: first as the leader would place them, then better on
the links of a topology, if there is one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from entities.planner.layer_rules import least_stages
from entities.planner.plan_at_once import ALTERNATIVES, plan_at_once
from entities.planner.plan_request import (
    BY_SEARCH,
    BY_SIMULATION,
    Alternative,
    NoPlan,
    PlanAnswer,
    PlannedStep,
    PlanRequest,
)
from entities.planner.search.instance_assignment import AssignedStages, AssignmentConfig, best_assignments
from entities.planner.search.layer_chain import LayerChain
from entities.planner.search.plan_places import first_places, groups_of, kind_of, on_links
from entities.planner.search.plan_trial import JUDGED, Judge, PlanCandidate, judged
from entities.planner.search.step_cost import InstanceKind, StepCost, StepForecast, StepSettings
from schemas.plain_text import shown

COARSE_PIECES, FINER_PIECES, FEW_SLOTS = 64, 128, 8
"""While instances are assigned, a longer chain has so many pieces at most, and the second number where there
are few slots; the last cut uses all edges."""
STAGE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""That are tried where the planner chooses; then those beside the best one."""


def search_plan(request: PlanRequest, judge: Judge | None = None) -> PlanAnswer:
    """Plans a job.

    Args:
        request: the job, and what is free.
        judge: simulates the best candidates; its step is their forecast then. None: the formula's is.

    Raises:
        NoPlan: what stands against it, in one line.
    """
    chain = chain_of_request(request)
    kinds = sorted({kind_of(slot) for slot in request.slots})
    if not kinds:
        raise NoPlan("no slot is free: wait for a job to end, or join a node", never=False)
    counts = Counter(kind_of(slot) for slot in request.slots)
    have = [counts[kind] for kind in kinds]
    settings = settings_of(request)
    pins = tuple(layer.pinned_to for layer in request.layers)
    fine = StepCost(chain, kinds, settings, pins, request.parted)
    pieces = FINER_PIECES if sum(have) <= FEW_SLOTS else COARSE_PIECES
    coarse = StepCost(coarser(chain, pieces, request.parted), kinds, settings, pins, request.parted)
    candidates = _candidates(request, fine, coarse, have)
    fitting = [candidate for candidate in candidates if candidate.found.cuts]
    if not fitting:
        raise _nothing_fits(request, fine, kinds)
    if judge is not None:
        fitting = judged(fitting, fine, request, judge)
    chosen = _choose(fitting, request)
    if len({(each.shape, round(each.found.step_ms)) for each in fitting}) <= ALTERNATIVES:
        shapes = _other_shapes(request, fine, coarse, have, chosen)
        fitting += judged(shapes, fine, request, judge) if shapes and chosen.simulated and judge else shapes
    forecast = chosen.forecast
    others = sorted(
        (other for other in fitting if other is not chosen), key=lambda other: other.found.step_ms
    )
    answer = PlanAnswer(
        cuts=tuple(chosen.found.cuts),
        replicas=tuple(sum(group) for group in chosen.found.groups),
        places=first_places(request, kinds, forecast.stages),
        forecast=_planned_step(forecast),
        reason=f"{chosen.shape}: {forecast.reason()}",
        alternatives=tuple(_alternatives(chosen, others, request)),
        planned_by=BY_SIMULATION if chosen.simulated else BY_SEARCH,
    )
    notes = _notes(request, len(answer.alternatives))
    answer = replace(answer, reason=answer.reason + notes)
    if not (request.hosts or request.rules):
        return answer
    placed = on_links(request, answer)
    groups = groups_of(request, kinds, placed)
    if [_speeds(kinds, group) for group in groups] == [
        _speeds(kinds, group) for group in chosen.found.groups
    ]:
        return placed
    # constraints had units go to slots of other speeds
    forecast = fine.forecast(list(placed.cuts), groups)
    moved = PlanCandidate(replace(chosen.found, step_ms=forecast.step_ms, groups=tuple(groups)), forecast)
    if judge is not None and chosen.simulated:
        [moved] = judged([moved], fine, request, judge)
    step = replace(_planned_step(moved.forecast), busiest_link_ms=placed.forecast.busiest_link_ms)
    reason = f"{moved.shape}, where constraints let them be: {moved.forecast.reason()}{notes}"
    by = BY_SIMULATION if moved.simulated else BY_SEARCH
    return replace(placed, forecast=step, reason=reason, planned_by=by)


def _notes(request: PlanRequest, others: int) -> str:
    """What a reason says beside its shape: that there are few other plans, and which wishes are not kept."""
    notes = ""
    if others < ALTERNATIVES:
        notes = f"; no more than {others} other plan{'' if others == 1 else 's'} found"
    return notes + (f"; not kept: {', '.join(request.unkept)}" if request.unkept else "")


def _speeds(kinds: Sequence[InstanceKind], group: Sequence[int]) -> Counter[float]:
    """How many instances of each speed a group has: their labels say nothing of time."""
    found = Counter[float]()
    for kind, count in zip(kinds, group, strict=True):
        if count:
            found[kind.speed] += count
    return found


def _planned_step(forecast: StepForecast) -> PlannedStep:
    return PlannedStep(
        step_ms=forecast.step_ms,
        bottleneck_ms=forecast.bottleneck_ms,
        fill_ms=forecast.fill_ms,
        reduction_ms=forecast.reduction_ms,
        constant_ms=forecast.constant_ms,
        stage_ms=tuple(stage.total_ms for stage in forecast.stages),
        memory_bytes=tuple(stage.memory_bytes for stage in forecast.stages),
    )


def settings_of(request: PlanRequest) -> StepSettings:
    """What the request's step depends on, as the cost model takes it."""
    return StepSettings(
        microbatches=request.microbatches,
        link_bytes_per_s=request.link_bytes_per_s,
        hop_ms=request.hop_ms,
        constant_ms=request.constant_ms,
        instance_ms=request.instance_ms,
        most_held=request.most_held,
        memory_factor=request.memory_factor,
    )


def chain_of_request(request: PlanRequest) -> LayerChain:
    """The layers as the cost model takes them."""
    layers = request.layers
    if not layers:
        raise NoPlan("the model has no layers: nothing can be planned")
    columns = np.array(
        [
            (layer.work_ms, layer.state_bytes, layer.activation_bytes, layer.sums_bytes, layer.output_bytes)
            for layer in layers
        ]
    )
    crossing = np.concatenate([[request.input_bytes], columns[:, 4]])
    crossing[-1] = 0.0
    return LayerChain(
        names=tuple(layer.name for layer in layers),
        work_ms=columns[:, 0],
        state_bytes=columns[:, 1],
        activation_bytes=columns[:, 2],
        reduction_bytes=columns[:, 3],
        crossing_bytes=crossing,
        edges=request.edges or tuple(range(len(layers) + 1)),
    )


def coarser(chain: LayerChain, pieces: int, parted: Sequence[tuple[int, int, str]] = ()) -> LayerChain:
    """The chain with at most so many pieces between its edges, each with about its share of the work.

    Edges between parted layers stay beside these.
    """
    count = len(chain.edges) - 1
    if count <= pieces:
        return chain
    reached = np.cumsum(np.add.reduceat(chain.work_ms, np.array(chain.edges[:-1])))
    inner = np.arange(1, pieces)
    at = np.searchsorted(reached, reached[-1] * inner / pieces) + 1
    at = np.maximum.accumulate(at - inner) + inner  # no piece is empty, however heavy the one before it is
    at = np.minimum(at, count - pieces + inner)
    kept = {chain.edges[edge] for edge in (*at, count)}
    for lower, upper, _ in parted:
        kept.add(chain.edges[bisect_right(chain.edges, lower)])
        kept.add(chain.edges[bisect_right(chain.edges, upper) - 1])
    return replace(chain, edges=(0, *sorted(kept)))


def _candidates(
    request: PlanRequest, fine: StepCost, coarse: StepCost, have: Sequence[int]
) -> list[PlanCandidate]:
    total = sum(have) - sum(request.standbys)
    shape = request.replicas
    if request.stages is not None:
        stage_counts = [request.stages]
    elif shape is not None and len(shape) > 1:
        stage_counts = [len(shape)]
    else:
        most = min(fine.pieces, total, request.most_stages)
        least = least_stages(request)
        stage_counts = sorted({least, *STAGE_COUNTS})
        stage_counts = [count for count in stage_counts if least <= count <= max(most, least)]
    if stage_counts and stage_counts[0] > fine.pieces:
        raise NoPlan(
            f"parallel.stages is {stage_counts[0]}, but the model can be cut into {fine.pieces}: "
            f"set parallel.stages to at most {fine.pieces}"
        )
    needed = sum(shape) if shape is not None else (request.stages or least_stages(request))
    if needed > total:
        raise NoPlan(
            f"needs {needed + sum(request.standbys)} slots, {sum(have)} are free: wait for a job to end, or "
            "join a node",
            never=False,
        )
    several = len(stage_counts) > 1
    short = AssignmentConfig(
        restarts=3 if several else 7,
        stale_moves=4 if several else 20,
        evaluations=max(50, int((240 if several else 3_000) * request.effort)),
        candidates=40 if several else 80,
        seed=request.seed,
    )

    def best(stages: int, config: AssignmentConfig) -> list[AssignedStages]:
        return best_assignments(coarse, have, stages, shape=shape, config=config, most=JUDGED)

    found = [best(stages, short) for stages in stage_counts]
    if several:
        first = min(range(len(found)), key=lambda at: found[at][0].step_ms)
        beside = {stage_counts[first] + step for step in (-2, -1, 1, 2)} - set(stage_counts)
        for stages in sorted(count for count in beside if least <= count <= most):
            stage_counts.append(stages)
            found.append(best(stages, short))
        longer = replace(
            short,
            restarts=7,
            stale_moves=12,
            candidates=60,
            evaluations=max(100, int(1_200 * request.effort)),
        )
        for at in sorted(range(len(found)), key=lambda at: found[at][0].step_ms)[:2]:
            found[at] = [*found[at], *best(stage_counts[at], longer)]
    # the best of each number of stages, and the best others whatever theirs is
    firsts = [min(tables, key=lambda assigned: assigned.step_ms) for tables in found]
    others = sorted(
        (assigned for tables in found for assigned in tables), key=lambda assigned: assigned.step_ms
    )
    chosen = {assigned.groups: assigned for assigned in (*firsts, *others[: 2 * JUDGED])}
    return [_recut(fine, assigned) for assigned in chosen.values()]


def _other_shapes(
    request: PlanRequest, fine: StepCost, coarse: StepCost, have: Sequence[int], chosen: PlanCandidate
) -> list[PlanCandidate]:
    """What other stages and replicas than the job asks for would take, where what it asks for leaves few
    choices: a stage fewer and more of as many instances, and an instance fewer."""
    counts = [sum(group) for group in chosen.found.groups]
    total, stages = sum(counts), len(counts)
    shapes = []
    for count in (stages - 1, stages + 1):
        if least_stages(request) <= count <= min(total, fine.pieces):
            shapes.append([(at + 1) * total // count - at * total // count for at in range(count)])
    if (largest := max(counts)) > 1:
        at = counts.index(largest)
        shapes.append([*counts[:at], largest - 1, *counts[at + 1 :]])
    config = AssignmentConfig(restarts=3, stale_moves=4, evaluations=50, candidates=40, seed=request.seed)
    found = [
        best_assignments(coarse, have, len(shape), shape=shape, config=config, most=1)[0] for shape in shapes
    ]
    return [other for other in (_recut(fine, assigned) for assigned in found) if other.found.cuts]


def _recut(fine: StepCost, assigned: AssignedStages) -> PlanCandidate:
    step_ms, cuts = fine.best_cut(assigned.groups, assigned.step_ms if assigned.cuts else np.inf)
    recut = replace(assigned, step_ms=step_ms, cuts=cuts)
    nothing = StepForecast(
        step_ms=step_ms, bottleneck_ms=0, fill_ms=0, reduction_ms=0, constant_ms=0, stages=()
    )
    return PlanCandidate(recut, fine.forecast(cuts, assigned.groups) if cuts else nothing)


def _choose(fitting: Sequence[PlanCandidate], request: PlanRequest) -> PlanCandidate:
    """The shortest step; among those hardly longer, one with fewer instances."""
    best = min(fitting, key=lambda candidate: candidate.found.step_ms)
    fewer = [
        candidate
        for candidate in fitting
        if candidate.found.step_ms
        <= best.found.step_ms
        * (1 + request.least_gain * max(0, best.found.instances - candidate.found.instances))
    ]
    return min(fewer, key=lambda candidate: (candidate.found.instances, candidate.found.step_ms))


def _alternatives(
    chosen: PlanCandidate, others: Sequence[PlanCandidate], request: PlanRequest
) -> list[Alternative]:
    distinct: dict[tuple[str, int], PlanCandidate] = {}  # those that read alike are one
    for other in others:
        distinct.setdefault((other.shape, round(other.found.step_ms)), other)
    distinct.pop((chosen.shape, round(chosen.found.step_ms)), None)
    found = [
        Alternative(other.shape, other.found.step_ms, _why_not(chosen, other))
        for other in list(distinct.values())[:ALTERNATIVES]
    ]
    if len(found) == ALTERNATIVES:
        return found
    name = "equal shares of work, slots as they come"
    try:
        greedy = plan_at_once(request)
    except NoPlan as refused:
        return [*found, Alternative(name, None, f"does not fit: {refused}")]
    longer = greedy.forecast.step_ms / chosen.found.step_ms
    why = f"its step takes {longer:.2f} times as long" if longer > 1.0005 else "it is no shorter"
    if chosen.simulated and longer < 1:
        why = "by the formula alone: what instances wait for each other is not in it"
    return [*found, Alternative(name, greedy.forecast.step_ms, why)]


def _why_not(chosen: PlanCandidate, other: PlanCandidate) -> str:
    if other.found.step_ms < chosen.found.step_ms:
        more = other.found.instances - chosen.found.instances
        if more <= 0:
            less = 1 - other.found.step_ms / chosen.found.step_ms
            return f"{less:.1%} shorter: the job asks for other stages or replicas"
        return f"{1 - other.found.step_ms / chosen.found.step_ms:.1%} shorter for {more} instances more"
    mine, theirs = chosen.forecast, other.forecast
    parts = {
        "its latest stage works": theirs.bottleneck_ms - mine.bottleneck_ms,
        "its stages wait for each other": theirs.fill_ms - mine.fill_ms,
        "its gradients are summed": theirs.reduction_ms - mine.reduction_ms,
        "its orders and votes take": theirs.constant_ms - mine.constant_ms,
    }
    name = max(parts, key=parts.__getitem__)
    if round(theirs.step_ms - mine.step_ms) <= 0 and other.found.instances == chosen.found.instances:
        return "as long"
    if parts[name] <= 0:
        return f"as long with {other.found.instances} instances instead of {chosen.found.instances}"
    return f"{name} {parts[name]:.0f} ms longer"


def _nothing_fits(request: PlanRequest, fine: StepCost, kinds: Sequence[InstanceKind]) -> NoPlan:
    """Which layer, or else which cut, has no room, and by how much."""
    if not all(kind.memory_bytes for kind in kinds):  # it is not known, so it is not what is missing
        return NoPlan(
            f"no cut into {request.stages or 'any number of'} stages keeps all constraints on the "
            f"{len(request.slots)} free slots: set other parallel.stages, or ask for less in "
            "plan.constraints",
            never=False,
        )
    largest = max(kind.memory_bytes for kind in kinds)
    needs = [(fine.memory_bytes(piece, piece + 1, 1), piece) for piece in range(fine.pieces)]
    need, piece = max(needs)
    if need > largest:
        name = fine.chain.names[fine.chain.edges[piece]]
        return too_small_layer(name, need, largest)
    most = sum(slot.memory_bytes for slot in request.slots)
    state = float(np.sum(fine.chain.state_bytes)) * request.memory_factor
    return NoPlan(
        f"no cut into {request.stages or 'any number of'} stages fits: the model needs "
        f"{shown(state)} of state and its activations, the largest slot has {shown(largest)}, all "
        f"{len(request.slots)} free ones {shown(most)}: set more parallel.stages, fewer "
        "training.microbatch_samples, or join a larger node"
    )


def too_small_layer(name: str, need: float, largest: float) -> NoPlan:
    """A layer that fits nowhere."""
    return NoPlan(
        f"layer {name} alone needs {shown(need)}, the largest slot has {shown(largest)} "
        f"({shown(need - largest)} too little): set fewer training.microbatch_samples, make it "
        "several layers, or join a larger node"
    )
