"""Which unit runs where (draft §4.5(3)): replicas of a stage apart, neighbours of a pipeline together.

The algorithm is greedy and deterministic. A stage's replicas are spread over clusters first, then over nodes,
so that the loss of one does not lose the stage. Replica r of every stage prefers the same cluster, so that a
microbatch can stay inside it. Data units go beside the first stage's instances and take no slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from schemas.cluster import NodeStatus
from schemas.task_graph import Placement, TaskUnit, UnitKind

Cordoned = Mapping[str, Collection[int | None]]
"""Slots that get no new instances, by node agent; None stands for the whole node."""


@dataclass(frozen=True)
class NoRoom:
    """Why the job can't be placed now: it stays queued with this reason."""

    reason: str


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
    free: dict[str, list[int]] = {}
    closed = 0
    for node in usable:
        taken = {place.slot for place in occupied.get(node.sid, ())}
        unused = [slot.index for slot in node.slots if slot.busy_with is None and slot.index not in taken]
        free[node.sid] = [index for index in unused if not is_cordoned(cordoned, node.sid, index)]
        closed += len(unused) - len(free[node.sid])
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
    by_sid = {node.sid: node for node in usable}
    placed: list[Placement] = []
    for unit in sorted(stages, key=lambda unit: (unit.replica, unit.stage)):
        siblings = [other for other in placed if _stage(units, other.sid) == unit.stage]

        def score(
            sid: str, unit: TaskUnit = unit, siblings: list[Placement] = siblings
        ) -> tuple[object, ...]:
            node = by_sid[sid]
            home = order[unit.replica % len(order)]
            return (
                sum(other.cluster == node.cluster for other in siblings),
                node.cluster != home,
                sum(other.node == node.node for other in siblings),
                -len(free[sid]),
                order.index(node.cluster),
                sid,
            )

        sid = min((sid for sid, slots in free.items() if slots), key=score)
        index = free[sid].pop(0)
        node = by_sid[sid]
        device = next(slot.device for slot in node.slots if slot.index == index)
        placed.append(
            Placement(sid=unit.sid, cluster=node.cluster, node=node.node, slot=index, device=device)
        )
    entry = [place for place in placed if _stage(units, place.sid) == 0]
    homes: list[Placement] = []
    for place in entry:
        if all(place.cluster != home.cluster for home in homes):
            homes.append(place)
    open_to_data = [node for node in usable if None not in cordoned.get(node.sid, ())]
    if not open_to_data:
        return NoRoom(f"all {len(usable)} nodes are cordoned: waiting for one to be uncordoned or to join")
    for unit in units:
        if unit.kind is UnitKind.DATA:
            beside = homes[unit.replica % len(homes)] if homes else None
            node_name = beside.node if beside else open_to_data[0].node
            cluster = beside.cluster if beside else open_to_data[0].cluster
            placed.append(Placement(sid=unit.sid, cluster=cluster, node=node_name, slot=-1, device="cpu"))
    return tuple(sorted(placed, key=lambda place: [unit.sid for unit in units].index(place.sid)))


def is_cordoned(cordoned: Cordoned, agent: str, slot: int) -> bool:
    """Whether a slot is cordoned, by its own cordon or its node's. Data units have slot -1."""
    places = cordoned.get(agent, ())
    return None in places or slot in places


def _stage(units: Sequence[TaskUnit], sid: str) -> int:
    return next(unit.stage for unit in units if unit.sid == sid)
