"""Lanes: places for units of builds, beside the slots that compute (ADR-0088). Pure.

Each open slot of a node that takes units has a lane. Units run at the lowest priority and leave the slot
free, so lanes cost training no slot; but a node whose slots compute should not do as many units as well. So a
lane is open while its slot is free, and one lane of each node always is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from entities.orchestrator.queue.mesh_slots import SlotFacts
from entities.queue.queued_job import ActiveJob, JobRequest, WorkKind
from entities.queue.slot_pools import MeshSlot, SlotTable
from schemas.cluster import NodeStatus

COMPUTING = "(computing)"
"""Who holds the lanes of slots in which jobs compute."""
LANE = "lane"
"""The kind of all lanes: units ask for no kind of device."""


def lane_name(slot: str) -> str:
    """The id of a slot's lane in the queue's core."""
    return f"{slot}/{LANE}"


def agent_of(lane: str) -> str:
    """The SID of the node agent whose lane it is."""
    return lane.partition("/")[0]


class RegisteredLanes:
    """The slots of the mesh with their lanes, made anew only when one of them has changed."""

    def __init__(self) -> None:
        self._slots: SlotTable | None = None
        self._speeds: dict[str, float] = {}
        self._table = SlotTable(())
        self._of_nodes: dict[str, list[str]] = {}

    def table(self, slots: SlotTable, nodes: Iterable[NodeStatus]) -> SlotTable:
        """Those slots, then the lanes of these nodes, best first; the same table if it would be equal.

        Best is where a unit is expected to end first: by the units that may be there already, and by speed.

        Args:
            slots: the slots of the mesh.
            nodes: the nodes that take units.
        """
        speeds = {node.sid: _speed(node) for node in nodes}
        if slots is self._slots and speeds == self._speeds:
            return self._table
        of_nodes: defaultdict[str, list[str]] = defaultdict(list)
        ranked: list[tuple[float, str, MeshSlot]] = []
        for slot in slots.slots:
            if slot.closed or slot.node not in speeds:
                continue
            before = of_nodes[slot.node]
            lane = replace(slot, slot=lane_name(slot.slot), kind=LANE, memory_bytes=0, labels=(), lane=True)
            ranked.append(((len(before) + 1) / speeds[slot.node], slot.node, lane))
            before.append(slot.slot)
        ranked.sort(key=lambda each: each[:2])
        self._slots, self._speeds, self._of_nodes = slots, speeds, dict(of_nodes)
        self._table = SlotTable([*slots.slots, *(lane for _, _, lane in ranked)])
        return self._table

    def shut(self, taken: Collection[str]) -> frozenset[str]:
        """The lanes that get no unit now. `taken`: the slots in which somebody computes."""
        shut: set[str] = set()
        for slots in self._of_nodes.values():
            busy = [slot for slot in slots if slot in taken]
            if len(busy) == len(slots):
                del busy[0]
            shut.update(lane_name(slot) for slot in busy)
        return frozenset(shut)

    def open(self, facts: SlotFacts) -> frozenset[str]:
        """The lanes that may have units now. `facts`: who holds which slots."""
        shut = self.shut(taken_slots(facts))
        return frozenset(slot.slot for slot in self._table.slots if slot.lane and slot.slot not in shut)


def taken_slots(facts: SlotFacts) -> set[str]:
    """The slots in which somebody computes, or will in a moment."""
    return {slot for job in facts.running for slot in job.slots}


def with_builds(
    facts: SlotFacts, table: SlotTable, open_lanes: Collection[str], builds: Iterable[ActiveJob]
) -> SlotFacts:
    """The same facts with lanes, and with the builds that hold some of them.

    Lanes that are not open are nobody's to have; one in which a unit has not ended yet is still its build's.

    Args:
        facts: slots, and the jobs that wait and run; waiting builds among them.
        table: the slots with their lanes.
        open_lanes: those that may have units now.
        builds: the builds that hold lanes, or are to.
    """
    running, held = list(facts.running), set[str]()
    for build in builds:
        lanes = tuple(lane for lane in build.slots if lane in table.index)
        held.update(lanes)
        if lanes:
            running.append(replace(build, slots=lanes))
    shut = tuple(
        slot.slot
        for slot in table.slots
        if slot.lane and slot.slot not in open_lanes and slot.slot not in held
    )
    if shut:
        computing = JobRequest(job=COMPUTING, submitted_at=0.0, work=WorkKind.PREPARATION)
        running.append(ActiveJob(request=computing, replicas=1, slots=shut, started_at=0.0, fixed=True))
    return replace(facts, table=table, running=tuple(running))


def _speed(node: NodeStatus) -> float:
    """Of its slots, as measured; rounded, so that a new measurement does not shuffle all lanes."""
    speeds = [slot.speed.get("stage", 1.0) for slot in node.slots]
    return max(0.1, round(sum(speeds) / len(speeds), 1)) if speeds else 1.0
