"""A cut between two nodes: told from a broken link and from a sick instance; which side is kept. Pure.

What is looked at are *failed edges*: one instance found nothing but silence where another says that it is.

- A link that broke and comes back leaves no failed edge.
- If one instance explains all failed edges between two nodes, and is not alone on its node, it may be the
  sick one: whoever fences the member with most failed edges (DESIGN §5 rule 8) is right.
- Two edges without a common instance, or one instance that does not reach two incarnations of the same
  unit, are a cut. So is the edge of two that are alone on their nodes, once both have told of it or one has
  twice: nobody can say which of them is sick, and moving one to the other's side mends either.

Whether both nodes answer on the bus is asked before anything is done about it: a dead node is no cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from schemas.job import NodeCut
from schemas.step import Member

REMEMBERED_S = 60.0
"""How long a failed edge counts."""
AVOIDED_S = 600.0
"""How long the node that was given up gets nothing of the job. Longer spares the job a cut that lasts,
shorter uses the node sooner after it was mended; either way it costs only what is lost or added meanwhile."""

Node = tuple[str, str]
"""(cluster, node)."""
Edge = frozenset[Member]


@dataclass(frozen=True, kw_only=True)
class NodePartition:
    """Two nodes that do not reach each other, in order; `edges`: the instances that have found out."""

    one: Node
    other: Node
    edges: tuple[tuple[Member, Member], ...]

    def __str__(self) -> str:
        pairs = ", ".join(f"{first.sid}–{second.sid}" for first, second in self.edges)
        return f"nodes {name(self.one)} and {name(self.other)} do not reach each other ({pairs})"


class FailedEdges:
    """One job's. `told` twice for one edge: by its two ends, or again by one."""

    def __init__(self) -> None:
        self._told: dict[Edge, list[float]] = {}
        self._where: dict[Member, Node] = {}

    def silence(
        self, witness: Member, at: Node, peer: Member, there: Node, alone: Collection[Member], now: float
    ) -> NodePartition | None:
        """`witness` on node `at` found nothing but silence where `peer` says that it is.

        Args:
            alone: of the two, those that are the job's only instance on their node.
            now: seconds.

        Returns:
            A cut between the two nodes, if that is what it has come to.
        """
        self._told = {edge: times for edge, times in self._told.items() if now - times[-1] < REMEMBERED_S}
        edge = frozenset({witness, peer})
        self._told.setdefault(edge, []).append(now)
        self._where |= {witness: at, peer: there}
        if at == there:
            return None
        one, other = sorted((at, there))
        between = [held for held in self._told if {self._where[member] for member in held} == {one, other}]
        lonely = len(alone) == 2 and len(self._told[edge]) > 1
        if not (lonely or _apart(between) or _again(between)):
            return None
        edges = [tuple(sorted(held, key=lambda member: self._where[member])) for held in between]
        edges.sort(key=lambda pair: [(member.sid, member.incarnation) for member in pair])
        return NodePartition(one=one, other=other, edges=tuple((first, second) for first, second in edges))

    def forget(self, cut: NodePartition) -> None:
        """Something was done about it, or it was none."""
        for pair in cut.edges:
            self._told.pop(frozenset(pair), None)


def _apart(edges: Iterable[Edge]) -> bool:
    """Two of them have no instance in common."""
    edges = list(edges)
    return any(not one & other for one in edges for other in edges)


def _again(edges: Iterable[Edge]) -> bool:
    """One instance does not reach two incarnations of the same unit: the first one was not sick."""
    seen: dict[tuple[Member, str], str] = {}
    for edge in edges:
        first, second = edge
        for own, peer in ((first, second), (second, first)):
            if seen.setdefault((own, peer.sid), peer.incarnation) != peer.incarnation:
                return True
    return False


@dataclass(frozen=True, kw_only=True)
class Side:
    """A node at a cut, and what the job has there.

    `stages`: those that keep a living member with its state if this side is kept; `room`: all of the job
    fits when the other node gets nothing.
    """

    node: Node
    instances: int
    stages: int
    room: bool


def kept(one: Side, other: Side) -> tuple[Side, Side, str]:
    """(the side to keep, the one to give up, why). With all else equal, the first name is kept."""
    best, rest = sorted(
        (one, other), key=lambda side: (not side.room, -side.stages, -side.instances, side.node)
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


def avoided(cuts: Iterable[NodeCut], present: Collection[Node], now: float) -> Mapping[Node, NodeCut]:
    """Nodes that get nothing of the job, as long as it has instances where the cut keeps others from them.

    Args:
        cuts: those that the job has met.
        present: nodes with living instances of the job.
        now: seconds since the epoch.
    """
    return {cut.given_up: cut for cut in cuts if now - cut.at < AVOIDED_S and cut.kept in present}


def name(node: Node) -> str:
    """As people name it."""
    return "/".join(node)
