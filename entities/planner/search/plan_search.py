"""The best plan that is found for a request, with the three best others and why not (ADR-0070).

For each number of stages the instances are assigned by tabu, each assignment judged by its exact cut. The
best ones are searched longer. Then units get slots: first as the leader would place them, then better on
the links of a topology, if there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from entities.planner.constraints import PlaceConstraint, PlaceFacts, check_constraints
from entities.planner.first_placement import NeededPlace, NodeRoom, NothingFits, place_first
from entities.planner.plan_at_once import plan_at_once, too_small
from entities.planner.plan_request import (
    Alternative,
    NoPlan,
    PlanAnswer,
    PlannedStep,
    PlanRequest,
    PlanSlot,
    UnitPlace,
)
from entities.planner.search.chain_cut import interval_sums, least_bottlenecks
from entities.planner.search.instance_assignment import AssignedStages, AssignmentConfig, assign_instances
from entities.planner.search.layer_graph import LayerChain
from entities.planner.search.link_placement import (
    LinkProblem,
    PlacementConfig,
    pipeline_traffic,
    place_on_links,
)
from entities.planner.search.network_topology import AccessRoutes, NetworkTopology
from entities.planner.search.step_cost import NO_FIT, InstanceKind, StepCost, StepForecast, StepSettings

COARSE_EDGES = 64
"""While instances are assigned, a longer chain is cut at so many edges at most; the last cut uses all."""
ALTERNATIVES = 3
STAGE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""That are tried where the planner chooses; then those beside the best one."""


@dataclass(frozen=True)
class _Candidate:
    """An assignment, cut at all edges, with its forecast."""

    found: AssignedStages
    forecast: StepForecast

    @property
    def shape(self) -> str:
        """In words: `2 stages of 3 and 2 instances`."""
        counts = [sum(group) for group in self.found.groups]
        stages = f"{len(counts)} stage{'s' if len(counts) > 1 else ''}"
        if len(set(counts)) == 1:
            return f"{stages} of {counts[0]} instance{'s' if counts[0] > 1 else ''}"
        return f"{stages} of {', '.join(map(str, counts[:-1]))} and {counts[-1]} instances"


def search_plan(request: PlanRequest) -> PlanAnswer:
    """Plans a job.

    Raises:
        NoPlan: what stands against it, in one line.
    """
    chain = chain_of_request(request)
    kinds = sorted({_kind(slot) for slot in request.slots})
    if not kinds:
        raise NoPlan("no slot is free: wait for a job to end, or join a node", never=False)
    _check_pins(request)
    counts = Counter(_kind(slot) for slot in request.slots)
    have = [counts[kind] for kind in kinds]
    settings = StepSettings(
        microbatches=request.microbatches,
        link_bytes_per_s=request.link_bytes_per_s,
        hop_ms=request.hop_ms,
        constant_ms=request.constant_ms,
        most_held=request.most_held,
        memory_factor=request.memory_factor,
    )
    pins = tuple(layer.pinned_to for layer in request.layers)
    fine = StepCost(chain, kinds, settings, pins)
    coarse = StepCost(coarser(chain, COARSE_EDGES), kinds, settings, pins)
    candidates = _candidates(request, fine, coarse, have)
    fitting = [candidate for candidate in candidates if candidate.found.cuts]
    if not fitting:
        raise _nothing_fits(request, fine, kinds)
    chosen = _choose(fitting, request)
    forecast = chosen.forecast
    others = sorted(
        (other for other in fitting if other is not chosen), key=lambda other: other.found.step_ms
    )
    answer = PlanAnswer(
        cuts=tuple(chosen.found.cuts),
        replicas=tuple(sum(group) for group in chosen.found.groups),
        places=_place(request, kinds, chosen),
        forecast=PlannedStep(
            step_ms=forecast.step_ms,
            bottleneck_ms=forecast.bottleneck_ms,
            fill_ms=forecast.fill_ms,
            reduction_ms=forecast.reduction_ms,
            constant_ms=forecast.constant_ms,
            stage_ms=tuple(stage.total_ms for stage in forecast.stages),
            memory_bytes=tuple(stage.memory_bytes for stage in forecast.stages),
        ),
        reason=f"{chosen.shape}: {forecast.reason()}",
        alternatives=tuple(_alternatives(chosen, others, request)),
    )
    return _on_links(request, answer) if request.hosts or request.wishes else answer


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


def coarser(chain: LayerChain, pieces: int) -> LayerChain:
    """The chain with at most so many pieces between its edges, as equal in work as they can be."""
    if len(chain.edges) - 1 <= pieces:
        return chain
    work = interval_sums(np.add.reduceat(chain.work_ms, np.array(chain.edges[:-1])))
    _, cuts = least_bottlenecks(work, pieces)[-1]
    return replace(chain, edges=(0, *(chain.edges[last] for _, last in cuts)))


def _kind(slot: PlanSlot) -> InstanceKind:
    """Slots whose speed differs by less than the measurement of it does are alike."""
    return InstanceKind(float(f"{slot.speed:.2g}"), slot.memory_bytes, slot.labels)


def _check_pins(request: PlanRequest) -> None:
    have = {label for slot in request.slots for label in slot.labels}
    for layer in request.layers:
        if missing := [label for label in layer.pinned_to if label not in have]:
            shown = ", ".join(sorted(have)) or "none"
            raise NoPlan(
                f"layer {layer.name} is pinned to {missing[0]}, which no free slot has (labels here: "
                f"{shown}): "
                "name one of these, or give it to a node"
            )


def _candidates(
    request: PlanRequest, fine: StepCost, coarse: StepCost, have: Sequence[int]
) -> list[_Candidate]:
    total = sum(have) - sum(request.standbys)
    shape = request.replicas
    if request.stages is not None:
        stage_counts = [request.stages]
    elif shape is not None and len(shape) > 1:
        stage_counts = [len(shape)]
    else:
        most = min(fine.pieces, total, request.most_stages)
        stage_counts = [count for count in STAGE_COUNTS if count <= most]
    if stage_counts and stage_counts[0] > fine.pieces:
        raise NoPlan(
            f"parallel.stages is {stage_counts[0]}, but the model can be cut into {fine.pieces}: "
            f"set parallel.stages to at most {fine.pieces}"
        )
    needed = sum(shape) if shape is not None else (request.stages or 1)
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
    found = [assign_instances(coarse, have, stages, shape=shape, config=short) for stages in stage_counts]
    if several:
        best = min(range(len(found)), key=lambda at: found[at].step_ms)
        beside = {stage_counts[best] + step for step in (-2, -1, 1, 2)} - set(stage_counts)
        for stages in sorted(count for count in beside if 1 <= count <= most):
            stage_counts.append(stages)
            found.append(assign_instances(coarse, have, stages, shape=shape, config=short))
        longer = replace(
            short,
            restarts=7,
            stale_moves=12,
            candidates=60,
            evaluations=max(100, int(1_200 * request.effort)),
        )
        for at in sorted(range(len(found)), key=lambda at: found[at].step_ms)[:2]:
            again = assign_instances(coarse, have, stage_counts[at], shape=shape, config=longer)
            found[at] = min(found[at], again, key=lambda assigned: assigned.step_ms)
    return [_recut(fine, assigned) for assigned in found]


def _recut(fine: StepCost, assigned: AssignedStages) -> _Candidate:
    step_ms, cuts = fine.best_cut(assigned.groups)
    recut = replace(assigned, step_ms=step_ms, cuts=cuts)
    nothing = StepForecast(
        step_ms=step_ms, bottleneck_ms=0, fill_ms=0, reduction_ms=0, constant_ms=0, stages=()
    )
    return _Candidate(recut, fine.forecast(cuts, assigned.groups) if cuts else nothing)


def _choose(fitting: Sequence[_Candidate], request: PlanRequest) -> _Candidate:
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
    chosen: _Candidate, others: Sequence[_Candidate], request: PlanRequest
) -> list[Alternative]:
    found = [
        Alternative(other.shape, other.found.step_ms, _why_not(chosen, other))
        for other in others[:ALTERNATIVES]
    ]
    try:
        greedy = plan_at_once(request)
    except NoPlan as refused:
        greedy = None
        text = f"does not fit: {refused}"
    if len(found) < ALTERNATIVES:
        if greedy is None:
            found.append(Alternative("equal shares of work, slots as they come", NO_FIT, text))
        else:
            longer = greedy.forecast.step_ms / chosen.found.step_ms
            found.append(
                Alternative(
                    "equal shares of work, slots as they come",
                    greedy.forecast.step_ms,
                    f"its step takes {longer:.2f} times as long" if longer > 1.0005 else "it is no shorter",
                )
            )
    return found


def _why_not(chosen: _Candidate, other: _Candidate) -> str:
    if other.found.step_ms < chosen.found.step_ms:
        more = other.found.instances - chosen.found.instances
        return f"{1 - other.found.step_ms / chosen.found.step_ms:.1%} shorter for {more} instances more"
    mine, theirs = chosen.forecast, other.forecast
    parts = {
        "its costliest stage takes": theirs.bottleneck_ms - mine.bottleneck_ms,
        "its fill takes": theirs.fill_ms - mine.fill_ms,
        "its reduction takes": theirs.reduction_ms - mine.reduction_ms,
    }
    name = max(parts, key=parts.__getitem__)
    if parts[name] <= 0:
        return f"as long with {other.found.instances} instances instead of {chosen.found.instances}"
    return f"{name} {parts[name]:.0f} ms more"


def _nothing_fits(request: PlanRequest, fine: StepCost, kinds: Sequence[InstanceKind]) -> NoPlan:
    """Which layer, or else which cut, has no room, and by how much."""
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
        f"{state / 2**30:.2f} GiB of state and its activations, the largest "
        f"slot has {largest / 2**30:.2f} GiB, all {len(request.slots)} free ones {most / 2**30:.2f} GiB: "
        "set more "
        "parallel.stages, fewer training.microbatch_samples, or join a larger node"
    )


def too_small_layer(name: str, need: float, largest: float) -> NoPlan:
    """A layer that fits nowhere."""
    return NoPlan(
        f"layer {name} alone needs {need / 2**30:.2f} GiB, the largest slot has {largest / 2**30:.2f} GiB "
        f"({(need - largest) / 2**30:.2f} GiB too little): set fewer training.microbatch_samples, make it "
        "several "
        "layers, or join a larger node"
    )


# --- places -------------------------------------------------------------------------------------------
def _place(request: PlanRequest, kinds: Sequence[InstanceKind], chosen: _Candidate) -> tuple[UnitPlace, ...]:
    """A slot for each instance of each stage, as the leader would choose among slots of a kind."""
    wanted = _wanted(request, chosen)
    slots_of: dict[InstanceKind, list[int]] = defaultdict(list)
    for number, slot in enumerate(request.slots):
        slots_of[_kind(slot)].append(number)
    start, siblings = [-1] * len(wanted), defaultdict[int, list[tuple[str, str]]](list)
    taken: set[int] = set()
    for kind in kinds:
        mine = [at for at, (_, of) in enumerate(wanted) if of == kind]
        _fill(request, [wanted[at][0] for at in mine], mine, slots_of[kind], start, siblings, taken)
    spare = [at for at, (_, of) in enumerate(wanted) if of is None]
    free = [number for number in range(len(request.slots)) if number not in taken]
    _fill(request, [wanted[at][0] for at in spare], spare, free, start, siblings, taken)
    return tuple(
        UnitPlace(unit.stage, unit.replica, slot) for (unit, _), slot in zip(wanted, start, strict=True)
    )


def _wanted(request: PlanRequest, chosen: _Candidate) -> list[tuple[NeededPlace, InstanceKind | None]]:
    """Each unit, stage by stage, with the kind of slot that the plan gives it; None, a standby's, is any."""
    wanted: list[tuple[NeededPlace, InstanceKind | None]] = []
    for stage, forecast in enumerate(chosen.forecast.stages):
        kinds: list[InstanceKind | None] = [kind for kind, count in forecast.instances for _ in range(count)]
        kinds += [None] * (request.standbys[stage] if request.standbys else 0)
        wanted += [
            (NeededPlace(stage, replica, forecast.memory_bytes), kind) for replica, kind in enumerate(kinds)
        ]
    return wanted


def _fill(
    request: PlanRequest,
    units: Sequence[NeededPlace],
    numbers: Sequence[int],
    slots: Sequence[int],
    start: list[int],
    siblings: dict[int, list[tuple[str, str]]],
    taken: set[int],
) -> None:
    if not units:
        return
    by_node: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number in slots:
        by_node[request.slots[number].node, request.slots[number].cluster].append(number)
    nodes = [
        NodeRoom(sid, cluster, tuple((number, request.slots[number].memory_bytes) for number in sorted(mine)))
        for (sid, cluster), mine in sorted(by_node.items())
    ]
    found = place_first(units, nodes, request.clusters, siblings) if nodes else NothingFits(0, 0)
    if isinstance(found, NothingFits):
        raise too_small(units[found.unit], found.largest_bytes, request)
    for at, (_, slot) in zip(numbers, found, strict=True):
        start[at] = slot
        taken.add(slot)
    for unit, (node, _) in zip(units, found, strict=True):
        siblings[unit.stage].append((nodes[node].cluster, nodes[node].sid))


def link_problem(request: PlanRequest, answer: PlanAnswer) -> LinkProblem:
    """The traffic of a plan on the request's topology, its units in the order of `answer.places`.

    Without a topology all nodes hang on one switch, so that only constraints matter.

    Raises:
        NoPlan: the topology lacks nodes of the slots; constraints can't be kept.
    """
    names = sorted({slot.host or slot.node for slot in request.slots})
    if request.hosts:
        links = {(first, second): speed for first, second, speed in request.links}
        topology = NetworkTopology(request.hosts, links)
        topology.check_hosts(names)
    else:
        topology = NetworkTopology(tuple(names), {(name, "switch"): 1.25e7 for name in names})
    host = {name: number for number, name in enumerate(names)}
    first_slots = {slot.host or slot.node: slot for slot in reversed(request.slots)}
    labels: dict[str, set[str]] = defaultdict(set)
    for slot in request.slots:
        labels[slot.host or slot.node].update(slot.labels)
    facts = PlaceFacts(
        cluster=tuple(first_slots[name].cluster for name in names),
        labels=tuple(frozenset(labels[name]) for name in names),
    )
    constraints = _constraints(request, answer.places)
    check_constraints(constraints, facts)
    crossing = [
        request.layers[first - 1].output_bytes if first else request.input_bytes for first, _ in answer.cuts
    ]
    sums = [sum(layer.sums_bytes for layer in request.layers[first:last]) for first, last in answer.cuts]
    number_of = {(place.stage, place.replica): at for at, place in enumerate(answer.places)}
    working = [
        number_of[stage, replica] for stage, count in enumerate(answer.replicas) for replica in range(count)
    ]
    traffic = pipeline_traffic(answer.replicas, crossing, sums, request.microbatches)
    alike = [_kind(slot) for slot in request.slots]
    kinds = sorted(set(alike))
    return LinkProblem(
        traffic={(working[first], working[second]): size for (first, second), size in traffic.items()},
        slot_host=[host[slot.host or slot.node] for slot in request.slots],
        slot_class=[kinds.index(kind) for kind in alike],
        routes=AccessRoutes(topology, names),
        facts=facts,
        constraints=constraints,
    )


def _on_links(request: PlanRequest, answer: PlanAnswer) -> PlanAnswer:
    """The plan with better places on the links, its constraints kept."""
    problem = link_problem(request, answer)
    config = PlacementConfig(moves=max(20, int(240 * request.effort)), seed=request.seed)
    start = [place.slot for place in answer.places]
    found = [place_on_links(problem, begin, config) for begin in (start, _along_hosts(request, start))]
    best = min(found, key=lambda places: places.key)
    hosts = [problem.slot_host[slot] for slot in best.slots]
    for constraint in problem.constraints:
        if constraint.hard and problem.facts.breach(constraint, hosts):
            raise NoPlan(
                f"{constraint.shown} can't be kept on the {len(request.slots)} free slots: prefer it "
                "instead of "
                "demanding it, or join nodes",
                never=False,
            )
    places = tuple(replace(place, slot=slot) for place, slot in zip(answer.places, best.slots, strict=True))
    busiest = best.busiest_ms if request.hosts else 0.0
    return replace(answer, places=places, forecast=replace(answer.forecast, busiest_link_ms=busiest))


def _along_hosts(request: PlanRequest, start: Sequence[int]) -> list[int]:
    """The same slots, stage by stage along the hosts' names: what talks most is near."""
    alike: dict[InstanceKind, list[int]] = defaultdict(list)
    for slot in sorted(start, key=lambda slot: (request.slots[slot].host or request.slots[slot].node, slot)):
        alike[_kind(request.slots[slot])].append(slot)
    return [alike[_kind(request.slots[slot])].pop(0) for slot in start]


def _constraints(request: PlanRequest, units: Sequence[UnitPlace]) -> list[PlaceConstraint]:
    """The job's wishes on units; without one about spreading, each stage is spread over clusters by
    preference."""
    members: dict[int, list[int]] = defaultdict(list)
    for at, unit in enumerate(units):
        members[unit.stage].append(at)
    found = []
    for wish in request.wishes:
        of_stages = [stage for stage in wish.stages if stage in members]
        if unknown := [stage for stage in wish.stages if stage not in members]:
            raise NoPlan(
                f"{wish.name or wish.kind} names stage {unknown[0]}, but the plan has stages 0 to "
                f"{len(members) - 1}"
            )
        mine = tuple(at for stage in of_stages for at in members[stage])
        found.append(
            PlaceConstraint(
                kind=wish.kind, units=mine, scope=wish.scope, label=wish.label, hard=wish.hard, name=wish.name
            )
        )
    if len(request.clusters) > 1 and not any(wish.kind == "spread" for wish in request.wishes):
        found += [
            PlaceConstraint(kind="spread", units=tuple(mine), scope="cluster")
            for mine in members.values()
            if len(mine) > 1
        ]
    return found
