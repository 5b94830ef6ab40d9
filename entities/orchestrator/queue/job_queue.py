"""Whose turn it is: jobs that have no instances wait for room in one line. Pure.

Parked jobs first, for they have begun; then in the order of submission. Who stands behind starts only where
as many slots stay free as all those before it need: so a small job never takes what a large one waits for,
and none waits for slots that nobody before it could use. A job for which even the empty mesh has no room says
so, and holds nobody up (ADR-0037).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from entities.orchestrator.planning.placement import Cordoned, is_cordoned
from schemas.cluster import NodeStatus
from schemas.job import ParallelSpec
from schemas.task_graph import Placement


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One job in the line. `fits`: the mesh would have room for it, were nobody else there."""

    job: str
    slots: int
    clusters: tuple[str, ...]  # that it may use; empty: all
    submitted_at: float
    parked: bool
    fits: bool

    @property
    def rank(self) -> tuple[bool, float, str]:
        return not self.parked, self.submitted_at, self.job


def slots_of(parallel: ParallelSpec) -> int:
    """Slots that such a job takes: one for each replica and each standby of a stage."""
    return sum(parallel.replicas_per_stage()) + sum(parallel.standbys_per_stage())


def turn(mine: Waiting, line: Iterable[Waiting], free: Mapping[str, int]) -> str:
    """'' where it is this job's turn, else whom it waits for.

    Args:
        mine: the job that asks.
        line: all that wait, itself included or not.
        free: open slots by cluster.
    """
    before = sorted(
        (
            one
            for one in line
            if one.job != mine.job and one.fits and one.rank < mine.rank and _rivals(one, mine)
        ),
        key=lambda one: one.rank,
    )
    if not before:
        return ""
    open_to_it = sum(count for name, count in free.items() if not mine.clusters or name in mine.clusters)
    kept = sum(one.slots for one in before)
    if kept + mine.slots <= open_to_it:
        return ""
    first = before[0]
    others = f" and {len(before) - 1} more" if len(before) > 1 else ""
    return (
        f"behind {first.job}{others}, which came first and need{'s' if not others else ''} {kept} slots: "
        f"{open_to_it} are free"
    )


def free_slots(
    nodes: Sequence[NodeStatus], occupied: Mapping[str, Sequence[Placement]], cordoned: Cordoned
) -> Counter[str]:
    """Slots by cluster that hold nothing, are promised to nobody, and are not cordoned."""
    found: Counter[str] = Counter()
    for node in nodes:
        taken = {place.slot for place in occupied.get(node.sid, ())}
        found[node.cluster] += sum(
            slot.busy_with is None
            and slot.index not in taken
            and not is_cordoned(cordoned, node.sid, slot.index)
            for slot in node.slots
        )
    return found


def emptied(nodes: Iterable[NodeStatus]) -> list[NodeStatus]:
    """The same nodes, were nothing running there."""
    return [
        node.model_copy(
            update={"slots": tuple(slot.model_copy(update={"busy_with": None}) for slot in node.slots)}
        )
        for node in nodes
    ]


def _rivals(one: Waiting, other: Waiting) -> bool:
    return not one.clusters or not other.clusters or not set(one.clusters).isdisjoint(other.clusters)
