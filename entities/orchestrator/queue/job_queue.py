"""The job queue: jobs without instances wait for room in one line. Pure.

Parked jobs come first, because they have begun; then jobs in the order of submission. A job starts before
others only if as many slots stay free as all jobs before it need. So a small job never takes slots for which
a large one waits, and no job waits for slots that none before it could use. A job that does not fit the empty
mesh says so, and delays no other (ADR-0037).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from entities.orchestrator.planning.placement import Cordoned, free_slots
from schemas.cluster import NodeStatus
from schemas.job_file.parallel import ParallelSpec
from schemas.task_graph import Placement


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One job in the queue. `fits`: the mesh would have room for it if it were empty."""

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
    """The slots that a job takes: one for each replica and each standby of a stage."""
    return sum(parallel.replicas_per_stage()) + sum(parallel.standbys_per_stage())


def turn(mine: Waiting, line: Iterable[Waiting], free: Mapping[str, int]) -> str:
    """Whether it is this job's turn: '' if so, else the jobs for which it waits.

    Args:
        mine: the job that asks.
        line: all jobs that wait; it may contain `mine`.
        free: free slots by cluster.
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
    reserved = sum(one.slots for one in before)
    if reserved + mine.slots <= open_to_it:
        return ""
    first = before[0]
    others = f" and {len(before) - 1} more" if len(before) > 1 else ""
    return (
        f"behind {first.job}{others}, which came first and need{'s' if not others else ''} {reserved} slots: "
        f"{open_to_it} are free"
    )


def free_by_cluster(
    nodes: Sequence[NodeStatus], occupied: Mapping[str, Sequence[Placement]], cordoned: Cordoned
) -> Counter[str]:
    """Number of slots by cluster that are not busy, not promised to a job, and not cordoned."""
    slots, _ = free_slots(nodes, occupied, cordoned)
    free: Counter[str] = Counter()
    for node in nodes:
        free[node.cluster] += len(slots[node.sid])
    return free


def emptied(nodes: Iterable[NodeStatus]) -> list[NodeStatus]:
    """The same nodes with all slots free."""
    return [
        node.model_copy(
            update={"slots": tuple(slot.model_copy(update={"busy_with": None}) for slot in node.slots)}
        )
        for node in nodes
    ]


def _rivals(one: Waiting, other: Waiting) -> bool:
    """Whether two jobs may use the same cluster."""
    return not one.clusters or not other.clusters or not set(one.clusters).isdisjoint(other.clusters)
