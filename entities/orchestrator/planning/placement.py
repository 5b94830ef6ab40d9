"""Which unit runs where (draft §4.5(3)): replicas of a stage apart, neighbours of a pipeline together.

The planner places (`entities.planner.first_placement`): a stage's replicas over clusters first, then over
nodes, so that the loss of one does not lose the stage; replica r of every stage in the same cluster, so
that a microbatch can stay inside it; no unit in a slot with less memory than it needs. Data units go beside
the first stage's instances and take no slot.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from entities.orchestrator.planning.plan_rules import labels_for
from entities.planner.first_placement import NeededPlace, NodeRoom, NothingFits, place_first
from entities.planner.layer_rules import in_words
from schemas.cluster import NodeStatus, Slot
from schemas.plain_text import shown
from schemas.task_graph import Placement, TaskGraph, TaskUnit, UnitKind

STAGE = "stage"
"""The kind of work (`Capability.speed`) by which a stage's time is compared."""
Cordoned = Mapping[str, Collection[int | None]]
"""Slots that get no new instances, by node agent; None stands for the whole node."""


@dataclass(frozen=True)
class NoRoom:
    """Why the job can't be placed now: it stays queued with this reason."""

    reason: str
    never: bool = False
    """Nor would it fit if everything were free: the job has to change, or a larger node to join."""


@dataclass(frozen=True)
class OpenRoom:
    """The nodes that a job may use, and their free slots by agent."""

    nodes: Sequence[NodeStatus]
    order: Sequence[str]
    """Clusters by preference."""
    free: Mapping[str, Sequence[Slot]]
    open_to_data: Sequence[NodeStatus]
    """Those that are not cordoned as a whole."""


def open_room(
    nodes: Sequence[NodeStatus],
    wanted: int,
    *,
    clusters: Sequence[str] = (),
    occupied: Mapping[str, Sequence[Placement]] | None = None,
    cordoned: Cordoned | None = None,
) -> OpenRoom | NoRoom:
    """What is free for so many units.

    Args:
        nodes: the agents that registered, with their slots.
        wanted: slots that are needed.
        clusters: the allowed clusters, in this order of preference; empty: all, by name.
        occupied: placements promised to other jobs that slots do not show yet, by agent SID.
        cordoned: places that get no new instances.
    """
    occupied, cordoned = occupied or {}, cordoned or {}
    order = list(clusters) or sorted({node.cluster for node in nodes})
    allowed = set(order)
    usable = sorted((node for node in nodes if node.cluster in allowed), key=lambda node: node.sid)
    if not usable:
        names = ", ".join(clusters) if clusters else "any cluster"
        return NoRoom(f"no node of {names} has joined")
    indices, closed = free_slots(usable, occupied, cordoned)
    available = sum(map(len, indices.values()))
    if wanted > available:
        total = sum(len(node.slots) for node in usable)
        return NoRoom(
            f"needs {wanted} slots, {available} of {total} free"
            + (f" ({closed} cordoned)" if closed else "")
            + (f" in {', '.join(order)}" if clusters else "")
            + ": waiting for a job to end or a node to join"
        )
    open_to_data = [node for node in usable if None not in cordoned.get(node.sid, ())]
    if not open_to_data:
        return NoRoom(f"all {len(usable)} nodes are cordoned: waiting for one to be uncordoned or to join")
    free = {}
    for node in usable:
        mine = set(indices[node.sid])
        free[node.sid] = [slot for slot in node.slots if slot.index in mine]
    return OpenRoom(usable, order, free, open_to_data)


def place(
    units: Sequence[TaskUnit],
    nodes: Sequence[NodeStatus],
    *,
    clusters: Sequence[str] = (),
    occupied: Mapping[str, Sequence[Placement]] | None = None,
    cordoned: Cordoned | None = None,
) -> tuple[Placement, ...] | NoRoom:
    """Assigns each unit a slot.

    Args:
        units: the units to place, stages and data.
        nodes: the agents that registered, with their slots.
        clusters: as of `open_room`.
        occupied: likewise.
        cordoned: likewise.

    Returns:
        One placement per unit, or `NoRoom` with what is missing.
    """
    stages = [unit for unit in units if unit.kind is UnitKind.STAGE]
    room = open_room(nodes, len(stages), clusters=clusters, occupied=occupied, cordoned=cordoned)
    if isinstance(room, NoRoom):
        return room
    usable = {node.sid: node for node in room.nodes}
    wanted = {label for unit in stages for label in unit.requirements.labels}
    rooms = [
        NodeRoom(
            sid,
            node.cluster,
            tuple((slot.index, slot.memory_bytes) for slot in room.free[sid]),
            {slot.index: frozenset(labels_for(node, slot, wanted)) for slot in room.free[sid]}
            if wanted
            else {},
        )
        for sid, node in usable.items()
    ]
    needs = [
        NeededPlace(
            unit.stage, unit.replica, unit.requirements.memory_bytes, frozenset(unit.requirements.labels)
        )
        for unit in stages
    ]
    found = place_first(needs, rooms, room.order)
    if isinstance(found, NothingFits):
        unit = stages[found.unit]
        if unit.requirements.labels:
            what = " and ".join(map(in_words, unit.requirements.labels))
            return NoRoom(f"{unit.sid} is pinned to {what}, and no such slot is free: waiting for one")
        largest = max(slot.memory_bytes for node in room.nodes for slot in node.slots)
        return NoRoom(
            f"{unit.sid} needs {shown(unit.requirements.memory_bytes)}, the largest slot that is free has "
            f"{shown(found.largest_bytes)}: waiting for a larger one",
            never=unit.requirements.memory_bytes > largest,
        )
    placed = [
        placement(unit, usable[rooms[number].sid], slot)
        for unit, (number, slot) in zip(stages, found, strict=True)
    ]
    return with_data_units(units, placed, room)


def placement(unit: TaskUnit, node: NodeStatus, slot: int) -> Placement:
    """A unit in a slot of a node."""
    device = next(other.device for other in node.slots if other.index == slot)
    return Placement(sid=unit.sid, cluster=node.cluster, node=node.node, slot=slot, device=device)


def with_data_units(
    units: Sequence[TaskUnit], placed: Iterable[Placement], room: OpenRoom
) -> tuple[Placement, ...] | NoRoom:
    """Placements of all units, in their order, once those of stages are placed."""
    most = sum(len(node.slots) for node in room.open_to_data)
    for unit in units:
        if unit.kind is UnitKind.PREPROCESS and unit.replica >= most:
            return NoRoom(
                f"{unit.name} of data.preprocess may have at most one instance for each slot of the nodes, "
                f"here {most}: lower its replicas"
            )
    found = {place.sid: place for place in placed}
    first_stage = [found[unit.sid] for unit in units if unit.stage == 0 and unit.sid in found]
    for place in place_data_units(units, first_stage, room.open_to_data[0]):
        found[place.sid] = place
    for place in place_functions(units, room.open_to_data, room.order):
        found[place.sid] = place
    return tuple(found[unit.sid] for unit in units)


def free_slots(
    nodes: Sequence[NodeStatus], occupied: Mapping[str, Sequence[Placement]], cordoned: Cordoned
) -> tuple[dict[str, list[int]], int]:
    """The free slots of each node, by its agent's SID, and how many more would be free without cordons."""
    free: dict[str, list[int]] = {}
    closed = 0
    for node in nodes:
        taken = {place.slot for place in occupied.get(node.sid, ())}
        unused = [slot.index for slot in node.slots if slot.busy_with is None and slot.index not in taken]
        free[node.sid] = [index for index in unused if not is_cordoned(cordoned, node.sid, index)]
        closed += len(unused) - len(free[node.sid])
    return free, closed


def are_free(
    graph: TaskGraph,
    nodes: Iterable[NodeStatus],
    occupied: Mapping[str, Sequence[Placement]],
    cordoned: Cordoned,
) -> bool:
    """Whether all slots of a plan are there, and nobody has them. Arguments are those of `open_room`."""
    there = {(node.cluster, node.node): node for node in nodes}
    free: dict[str, set[int]] = {}
    for place in graph.placements:
        node = there.get((place.cluster, place.node))
        if node is None or is_cordoned(cordoned, node.sid, place.slot):
            return False
        if (unused := free.get(node.sid)) is None:
            taken = {other.slot for other in occupied.get(node.sid, ())}
            unused = {slot.index for slot in node.slots if slot.busy_with is None} - taken
            free[node.sid] = unused
        if place.slot >= 0 and place.slot not in unused:
            return False
    return True


def facts_digest(placements: Iterable[Placement], nodes: Iterable[NodeStatus]) -> str:
    """SHA-256 of what a plan's slots can do, as far as a plan depends on it; 64 hexadecimal digits.

    That is where they are, their kind, memory, speed and class of bits, and all labels. Who is in them is no
    part of it: that is `are_free`. A slot that is no longer there has nothing.
    """
    there = {(node.cluster, node.node): node for node in nodes}
    facts = []
    for place in sorted(placements, key=lambda place: place.sid):
        node = there.get((place.cluster, place.node))
        slots = () if node is None else node.slots
        slot = next((slot for slot in slots if slot.index == place.slot), None)
        able = slot and [
            slot.device_kind,
            slot.memory_bytes,
            f"{slot.speed.get(STAGE, 1.0) * slot.performance:.2g}",
            slot.bits_class,
            sorted(slot.labels.items()),
        ]
        facts.append([place.sid, place.cluster, place.node, place.slot, node and node.sid, able])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def place_data_units(
    units: Iterable[TaskUnit], first_stage: Iterable[Placement], otherwise: NodeStatus
) -> list[Placement]:
    """Places data units beside instances of the first stage, one cluster after the other; they take no slot.

    Without a first stage among the units they go to the node `otherwise`.
    """
    homes: dict[str, tuple[str, str]] = {}  # by cluster
    for place in first_stage:
        homes.setdefault(place.cluster, (place.cluster, place.node))
    places = list(homes.values()) or [(otherwise.cluster, otherwise.node)]
    placed = []
    for unit in units:
        if unit.kind is UnitKind.DATA:
            cluster, node = places[unit.replica % len(places)]
            placed.append(Placement(sid=unit.sid, cluster=cluster, node=node, slot=-1, device="cpu"))
    return placed


def place_functions(
    units: Iterable[TaskUnit], nodes: Sequence[NodeStatus], order: Sequence[str]
) -> list[Placement]:
    """Places units of `data.preprocess` over all nodes, clusters in turn; they take no slot.

    Slots count devices, and these compute on the processor beside them.
    """
    rank: dict[str, int] = {}
    of_cluster = Counter[str]()
    for node in sorted(nodes, key=lambda node: node.sid):
        rank[node.sid] = of_cluster[node.cluster]
        of_cluster[node.cluster] += 1
    in_turn = sorted(nodes, key=lambda node: (rank[node.sid], order.index(node.cluster), node.sid))
    homes = [(node.cluster, node.node) for node in in_turn]
    placed = []
    for unit in units:
        if unit.kind is UnitKind.PREPROCESS:
            cluster, name = homes[unit.replica % len(homes)]
            placed.append(Placement(sid=unit.sid, cluster=cluster, node=name, slot=-1, device="cpu"))
    return placed


def is_cordoned(cordoned: Cordoned, agent: str, slot: int) -> bool:
    """Whether a slot is cordoned, by its own cordon or its node's. Data units have slot -1."""
    places = cordoned.get(agent, ())
    return None in places or slot in places
