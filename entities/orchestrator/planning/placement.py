"""Which unit runs where (draft §4.5(3)): replicas of a stage apart, neighbours of a pipeline together.

The algorithm is greedy and deterministic. A stage's replicas are spread over clusters first, then over nodes,
so that the loss of one does not lose the stage. Replica r of every stage prefers the same cluster, so that a
microbatch can stay inside it. Data units go beside the first stage's instances and take no slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from schemas.cluster import NodeStatus
from schemas.task_graph import Placement, TaskUnit, UnitKind

Cordoned = Mapping[str, Collection[int | None]]
"""Slots that get no new instances, by node agent; None stands for the whole node."""


@dataclass(frozen=True)
class NoRoom:
    """Why the job can't be placed now: it stays queued with this reason."""

    reason: str
    never: bool = False
    """Nor would it fit if everything were free: the job has to change, or a larger node to join."""


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
        clusters: the allowed clusters, in this order of preference; empty: all, by name.
        occupied: placements promised to other jobs that slots do not show yet, by agent SID.
        cordoned: places that get no new instances.

    Returns:
        One placement per unit, or `NoRoom` with what is missing.
    """
    occupied, cordoned = occupied or {}, cordoned or {}
    order = list(clusters) or sorted({node.cluster for node in nodes})
    usable = sorted((node for node in nodes if node.cluster in order), key=lambda node: node.sid)
    if not usable:
        names = ", ".join(clusters) if clusters else "any cluster"
        return NoRoom(f"no node of {names} has joined")
    free, closed = free_slots(usable, occupied, cordoned)
    stages = [unit for unit in units if unit.kind is UnitKind.STAGE]
    available = sum(len(slots) for slots in free.values())
    if len(stages) > available:
        total = sum(len(node.slots) for node in usable)
        return NoRoom(
            f"needs {len(stages)} slots, {available} of {total} free"
            + (f" ({closed} cordoned)" if closed else "")
            + (f" in {', '.join(order)}" if clusters else "")
            + ": waiting for a job to end or a node to join"
        )
    by_stage: dict[int, list[Placement]] = {unit.stage: [] for unit in stages}
    for unit in sorted(stages, key=lambda unit: (unit.replica, unit.stage)):
        open_nodes = [node for node in usable if free[node.sid]]
        node = choose_node(unit, by_stage[unit.stage], open_nodes, free, order)
        index = free[node.sid].pop(0)
        device = next(slot.device for slot in node.slots if slot.index == index)
        by_stage[unit.stage].append(
            Placement(sid=unit.sid, cluster=node.cluster, node=node.node, slot=index, device=device)
        )
    open_to_data = [node for node in usable if None not in cordoned.get(node.sid, ())]
    if not open_to_data:
        return NoRoom(f"all {len(usable)} nodes are cordoned: waiting for one to be uncordoned or to join")
    most = sum(len(node.slots) for node in open_to_data)
    for unit in units:
        if unit.kind is UnitKind.PREPROCESS and unit.replica >= most:
            return NoRoom(
                f"{unit.name} of data.preprocess may have at most one instance for each slot of the nodes, "
                f"here {most}: lower its replicas"
            )
    data = place_data_units(units, by_stage.get(0, ()), open_to_data[0])
    functions = place_functions(units, open_to_data, order)
    placed = {place.sid: place for place in (*chain.from_iterable(by_stage.values()), *data, *functions)}
    return tuple(placed[unit.sid] for unit in units)


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


def choose_node(
    unit: TaskUnit,
    siblings: Sequence[Placement],
    nodes: Iterable[NodeStatus],
    free: Mapping[str, Sequence[int]],
    order: Sequence[str],
) -> NodeStatus:
    """The node for a stage's unit, among those with a free slot.

    Args:
        unit: the unit.
        siblings: where other replicas of its stage are; it goes to another cluster, or at least another node.
        nodes: the nodes to choose from.
        free: free slots by agent; a node with more of them is preferred.
        order: the clusters in order of preference; replica r is at home in the r-th.
    """
    home = order[unit.replica % len(order)]
    return min(
        nodes,
        key=lambda node: (
            sum(other.cluster == node.cluster for other in siblings),
            node.cluster != home,
            sum(other.node == node.node for other in siblings),
            -len(free[node.sid]),
            order.index(node.cluster),
            node.sid,
        ),
    )


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
    in_turn = sorted(
        nodes,
        key=lambda node: (
            sum(other.cluster == node.cluster and other.sid < node.sid for other in nodes),
            order.index(node.cluster),
            node.sid,
        ),
    )
    homes = [(node.cluster, node.node) for node in in_turn]
    placed = []
    for unit in units:
        if unit.kind is UnitKind.PREPROCESS:
            cluster, node = homes[unit.replica % len(homes)]
            placed.append(Placement(sid=unit.sid, cluster=cluster, node=node, slot=-1, device="cpu"))
    return placed


def is_cordoned(cordoned: Cordoned, agent: str, slot: int) -> bool:
    """Whether a slot is cordoned, by its own cordon or its node's. Data units have slot -1."""
    places = cordoned.get(agent, ())
    return None in places or slot in places
