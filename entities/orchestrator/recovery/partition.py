"""A network partition between two nodes: what distinguishes it, and which side is kept. Pure.

The evidence is *failed edges*: one instance got no answer from another at the address that the other gives.

- A link that broke and comes back leaves no failed edge.
- If one instance explains all failed edges between two nodes, and is not alone on its node, it may be sick:
then
  the member with most failed edges is fenced (DESIGN §5 rule 8).
- Two edges without a common instance are a partition. So is one instance that does not reach two incarnations
of
  the same unit. So is the edge between two instances that are alone on their nodes, once both have reported
  it or one has twice: nobody can say which of them is sick, and moving one to the other's node helps in
  either case.

Before anything is done, both nodes are asked whether they answer on the bus: a dead node is no partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from schemas.job import NodeCut
from schemas.step import Member

Node = tuple[str, str]
"""(cluster, node)."""
Edge = frozenset[Member]


@dataclass(frozen=True, kw_only=True)
class NodePartition:
    """Two nodes that do not reach each other, in order; `edges`: the pairs of instances that noticed."""

    first: Node
    second: Node
    edges: tuple[tuple[Member, Member], ...]

    def __str__(self) -> str:
        pairs = ", ".join(f"{first.sid}–{second.sid}" for first, second in self.edges)
        return f"nodes {name(self.first)} and {name(self.second)} do not reach each other ({pairs})"


class FailedEdges:
    """The failed edges of one job. An edge is reported twice by its two ends, or twice by one of them.

    `remembered_s`: how long a failed edge counts.
    """

    def __init__(self, remembered_s: float = 60.0) -> None:
        self._remembered_s = remembered_s
        self._reports: dict[Edge, list[float]] = {}
        self._where: dict[Member, Node] = {}

    def silence(
        self, witness: Member, at: Node, peer: Member, there: Node, alone: Collection[Member], now: float
    ) -> NodePartition | None:
        """Notes that `witness` on node `at` got no answer from `peer` on node `there`.

        Args:
            witness: the instance that reports it.
            at: its node.
            peer: the silent instance.
            there: its node.
            alone: those of the two that are the job's only instance on their node.
            now: seconds.

        Returns:
            The partition between the two nodes, if the failed edges show one.
        """
        self._reports = {
            edge: times for edge, times in self._reports.items() if now - times[-1] < self._remembered_s
        }
        edge = frozenset({witness, peer})
        self._reports.setdefault(edge, []).append(now)
        self._where |= {witness: at, peer: there}
        if at == there:
            return None
        first, second = sorted((at, there))
        between = [
            candidate
            for candidate in self._reports
            if {self._where[member] for member in candidate} == {first, second}
        ]
        lonely = len(alone) == 2 and len(self._reports[edge]) > 1
        if not (lonely or _apart(between) or _again(between)):
            return None
        edges = [tuple(sorted(candidate, key=lambda member: self._where[member])) for candidate in between]
        edges.sort(key=lambda pair: [(member.sid, member.incarnation) for member in pair])
        return NodePartition(first=first, second=second, edges=tuple((left, right) for left, right in edges))

    def forget(self, cut: NodePartition) -> None:
        """Forgets the edges of a partition that was handled, or that turned out to be none."""
        for pair in cut.edges:
            self._reports.pop(frozenset(pair), None)


def _apart(edges: Iterable[Edge]) -> bool:
    """Whether two of the edges have no instance in common."""
    edges = list(edges)
    return any(not edge & other for edge in edges for other in edges)


def _again(edges: Iterable[Edge]) -> bool:
    """Whether one instance does not reach two incarnations of a unit: then the first one was not sick."""
    seen: dict[tuple[Member, str], str] = {}
    for edge in edges:
        first, second = edge
        for own, peer in ((first, second), (second, first)):
            if seen.setdefault((own, peer.sid), peer.incarnation) != peer.incarnation:
                return True
    return False


@dataclass(frozen=True, kw_only=True)
class Side:
    """One node of a partition, and what the job has there.

    `stages`: number of stages that keep a living member with its state if this side is kept; `room`: whether
    the whole job fits if the other node gets nothing.
    """

    node: Node
    instances: int
    stages: int
    room: bool


def choose_side(first: Side, second: Side) -> tuple[Side, Side, str]:
    """(the side to keep, the side to give up, why). With all else equal, the first name is kept."""
    best, rest = sorted(
        (first, second), key=lambda side: (not side.room, -side.stages, -side.instances, side.node)
    )
    if best.room != rest.room:
        why = "only there is room for all of the job"
    elif best.stages != rest.stages:
        why = "more stages keep their state so"
    elif best.instances != rest.instances:
        why = f"{best.instances} instances against {rest.instances}"
    else:
        why = f"{best.instances} instances on each side; the first name"
    return best, rest, why


def avoided(
    cuts: Iterable[NodeCut], present: Collection[Node], now: float, *, avoided_s: float = 600.0
) -> Mapping[Node, NodeCut]:
    """Nodes that get nothing of the job, while it has instances on the other side of their partition.

    Args:
        cuts: the partitions that the job has met.
        present: nodes with living instances of the job.
        now: seconds since the epoch.
        avoided_s: how long the node that was given up gets nothing of the job. A longer time spares the job a
            lasting partition; a shorter one uses the node sooner after it was repaired. Only instances that
            start meanwhile are affected.
    """
    return {cut.given_up: cut for cut in cuts if now - cut.at < avoided_s and cut.kept in present}


def name(node: Node) -> str:
    """The node's name for people, `cluster/node`."""
    return "/".join(node)
