"""Which slot each instance of a plan gets: as the leader would choose, then better on links, rules kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from entities.planner.constraints import PlaceFacts, constraints_on_units
from entities.planner.first_placement import NeededPlace, NodeRoom, NothingFits, place_first
from entities.planner.network_topology import NetworkTopology
from entities.planner.plan_at_once import too_small
from entities.planner.plan_request import LayerRule, NoPlan, PlanAnswer, PlanRequest, PlanSlot, UnitPlace
from entities.planner.search.access_routes import AccessRoutes
from entities.planner.search.link_placement import (
    LinkedPlaces,
    LinkProblem,
    PlacementConfig,
    pipeline_traffic,
    place_on_links,
)
from entities.planner.search.step_cost import InstanceKind, StageForecast


def kind_of(slot: PlanSlot) -> InstanceKind:
    """Slots whose speed differs by less than the measurement of it does are alike."""
    return InstanceKind(float(f"{slot.speed:.2g}"), slot.memory_bytes, slot.labels)


def first_places(
    request: PlanRequest, kinds: Sequence[InstanceKind], stages: Sequence[StageForecast]
) -> tuple[UnitPlace, ...]:
    """A slot for each instance of each stage, as the leader would choose among slots of a kind.

    Raises:
        NoPlan: a standby fits nowhere.
    """
    wanted = _wanted(request, stages)
    slots_of: dict[InstanceKind, list[int]] = defaultdict(list)
    for number, slot in enumerate(request.slots):
        slots_of[kind_of(slot)].append(number)
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


def _wanted(
    request: PlanRequest, stages: Sequence[StageForecast]
) -> list[tuple[NeededPlace, InstanceKind | None]]:
    """Each unit, stage by stage, with the kind of slot that the plan gives it; None, a standby's, is any."""
    wanted: list[tuple[NeededPlace, InstanceKind | None]] = []
    for stage, forecast in enumerate(stages):
        labels = frozenset(
            label for layer in request.layers[forecast.first : forecast.last] for label in layer.pinned_to
        )
        kinds: list[InstanceKind | None] = [kind for kind, count in forecast.instances for _ in range(count)]
        kinds += [None] * (request.standbys[stage] if request.standbys else 0)
        wanted += [
            (
                NeededPlace(stage, replica, forecast.memory_bytes, labels if kind is None else frozenset()),
                kind,
            )
            for replica, kind in enumerate(kinds)
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
        NodeRoom(
            sid,
            cluster,
            tuple((number, request.slots[number].memory_bytes) for number in sorted(mine)),
            {number: frozenset(request.slots[number].labels) for number in mine},
        )
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


def link_problem(request: PlanRequest, answer: PlanAnswer, *, any_speed: bool = False) -> LinkProblem:
    """The traffic of a plan on the request's topology, its units in the order of `answer.places`.

    Without a topology all nodes hang on one switch, so that only constraints matter. Hosts are nodes by their
    agents: in a topology several of them may be one machine. `any_speed`: units may go to slots of another
    speed that are large enough.

    Raises:
        NoPlan: the topology lacks nodes of the slots.
    """
    first_slots = {slot.node: slot for slot in reversed(request.slots)}
    nodes = sorted(first_slots)
    if request.hosts:
        names = [first_slots[node].host or node for node in nodes]
        links = {(first, second): speed for first, second, speed in request.links}
        topology = NetworkTopology(request.hosts, links)
        topology.check_hosts(names)
    else:
        names = nodes
        topology = NetworkTopology(tuple(names), {(name, "switch"): 1.25e7 for name in names})
    host = {node: number for number, node in enumerate(nodes)}
    labels: dict[str, set[str]] = defaultdict(set)
    for slot in request.slots:
        labels[slot.node].update(slot.labels)
    facts = PlaceFacts(
        cluster=tuple(first_slots[node].cluster for node in nodes),
        labels=tuple(frozenset(labels[node]) for node in nodes),
    )
    constraints = constraints_on_units([*_rules(request), *_pins(request)], answer.cuts, answer.places)
    crossing = [
        request.layers[first - 1].output_bytes if first else request.input_bytes for first, _ in answer.cuts
    ]
    sums = [sum(layer.sums_bytes for layer in request.layers[first:last]) for first, last in answer.cuts]
    number_of = {(place.stage, place.replica): at for at, place in enumerate(answer.places)}
    working = [
        number_of[stage, replica] for stage, count in enumerate(answer.replicas) for replica in range(count)
    ]
    traffic = pipeline_traffic(answer.replicas, crossing, sums, request.microbatches)
    alike = [replace(kind_of(slot), labels=()) for slot in request.slots]
    if any_speed:
        most = max(answer.forecast.memory_bytes)
        alike = [InstanceKind(1.0, 0 if kind.memory_bytes >= most else kind.memory_bytes) for kind in alike]
    kinds = sorted(set(alike))
    return LinkProblem(
        traffic={(working[first], working[second]): size for (first, second), size in traffic.items()},
        slot_host=[host[slot.node] for slot in request.slots],
        slot_class=[kinds.index(kind) for kind in alike],
        routes=AccessRoutes(topology, names),
        facts=facts,
        constraints=constraints,
    )


def on_links(request: PlanRequest, answer: PlanAnswer) -> PlanAnswer:
    """The plan with better places on the links, its constraints kept: on slots of the planned speeds, if
    possible.

    Raises:
        NoPlan: a hard constraint is kept nowhere that was tried.
    """
    for any_speed in (False, True):
        problem = link_problem(request, answer, any_speed=any_speed)
        best = _best_places(request, answer, problem)
        hosts = [problem.slot_host[slot] for slot in best.slots]
        broken = [
            constraint
            for constraint in problem.constraints
            if constraint.hard and problem.facts.breach(constraint, hosts)
        ]
        if not broken:
            break
    else:
        raise NoPlan(
            f"{broken[0].shown} can't be kept on the {len(request.slots)} free slots: prefer it instead of "
            "demanding it, or join nodes",
            never=False,
        )
    places = tuple(replace(place, slot=slot) for place, slot in zip(answer.places, best.slots, strict=True))
    busiest = best.busiest_ms if request.hosts else 0.0
    return replace(answer, places=places, forecast=replace(answer.forecast, busiest_link_ms=busiest))


def _best_places(request: PlanRequest, answer: PlanAnswer, problem: LinkProblem) -> LinkedPlaces:
    config = PlacementConfig(moves=max(20, int(240 * request.effort)), seed=request.seed)
    start = [place.slot for place in answer.places]
    found = [place_on_links(problem, begin, config) for begin in (start, _along_hosts(request, start))]
    return min(found, key=lambda places: places.key)


def groups_of(
    request: PlanRequest, kinds: Sequence[InstanceKind], answer: PlanAnswer
) -> list[tuple[int, ...]]:
    """How many working instances of each kind every stage has by the places of a plan."""
    groups = []
    for stage, count in enumerate(answer.replicas):
        mine = Counter(
            kind_of(request.slots[place.slot])
            for place in answer.places
            if place.stage == stage and place.replica < count
        )
        groups.append(tuple(mine[kind] for kind in kinds))
    return groups


def _along_hosts(request: PlanRequest, start: Sequence[int]) -> list[int]:
    """The same slots, stage by stage along the hosts' names: what talks most is near."""
    alike: dict[InstanceKind, list[int]] = defaultdict(list)
    for slot in sorted(start, key=lambda slot: (request.slots[slot].host, request.slots[slot].node, slot)):
        alike[kind_of(request.slots[slot])].append(slot)
    return [alike[kind_of(request.slots[slot])].pop(0) for slot in start]


def _pins(request: PlanRequest) -> list[LayerRule]:
    """What layers are pinned to, so that units may change between slots of other labels where none counts."""
    pinned: dict[str, list[int]] = defaultdict(list)
    for layer, profile in enumerate(request.layers):
        for label in profile.pinned_to:
            pinned[label].append(layer)
    return [LayerRule(kind="pin", groups=(tuple(layers),), label=label) for label, layers in pinned.items()]


def _rules(request: PlanRequest) -> list[LayerRule]:
    """Without one about spreading, each stage is spread over clusters by preference."""
    found = [*request.rules]
    if len(request.clusters) > 1 and not any(rule.kind == "spread" for rule in found):
        everything = tuple(range(len(request.layers)))
        found.append(LayerRule(kind="spread", groups=(everything,), scope="cluster", hard=False))
    return found
