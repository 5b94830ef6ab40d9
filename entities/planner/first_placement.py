"""The first place of each unit: O(units · log slots), pure Python, so the leader itself may ask (ADR-0071).

A stage's replicas are spread over clusters first, then over nodes, so that the loss of one does not lose the
stage. Replica r of every stage prefers the same cluster, so that a microbatch can stay inside it. No unit
gets a slot with less memory than it needs. Units that fit fewest slots choose first; since fits are nested,
all units get a place if there is a way to give all of them one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class NeededPlace:
    """One unit to place."""

    stage: int
    replica: int
    memory_bytes: int = 0
    labels: frozenset[str] = frozenset()
    """That its slot must have."""


@dataclass(frozen=True)
class NodeRoom:
    """One node with its free slots: (index, memory in bytes; 0: not known, fits all)."""

    sid: str
    cluster: str
    slots: tuple[tuple[int, int], ...]
    labels: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Of slots, by index."""

    def only(self, labels: frozenset[str], taken: Collection[int]) -> NodeRoom:
        """Its slots that have these labels and are not taken."""
        none = frozenset[str]()
        left = [
            (index, memory)
            for index, memory in self.slots
            if index not in taken and labels <= self.labels.get(index, none)
        ]
        return NodeRoom(self.sid, self.cluster, tuple(left), self.labels)


@dataclass(frozen=True)
class NothingFits:
    """The first unit for which no slot was left, and the largest memory of those that were."""

    unit: int
    largest_bytes: int


@dataclass
class _Free:
    """Free slots of a node, ascending by memory (unknown last), then index."""

    room: NodeRoom
    slots: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = sorted((memory or float("inf"), index) for index, memory in self.room.slots)

    def fits(self, memory_bytes: int) -> bool:
        return bool(self.slots) and self.slots[-1][0] >= memory_bytes

    def take(self, memory_bytes: int) -> int:
        """The smallest slot that fits, the first among equals."""
        return self.slots.pop(bisect_left(self.slots, (memory_bytes, -1)))[1]


def place_first(
    units: Sequence[NeededPlace],
    nodes: Sequence[NodeRoom],
    order: Sequence[str],
    siblings: Mapping[int, Collection[tuple[str, str]]] | None = None,
) -> list[tuple[int, int]] | NothingFits:
    """Assigns each unit a slot.

    Args:
        units: to place.
        nodes: with their free slots, those of clusters in `order` only.
        order: clusters by preference; replica r is at home in the r-th.
        siblings: (cluster, SID of the node's agent) of instances that each stage has already.

    Returns:
        (number of the node, index of the slot) of each unit.
    """
    if any(unit.labels for unit in units):
        return _place_by_labels(units, nodes, order, siblings or {})
    free = [_Free(room) for room in nodes]
    search = _ClusterHeaps(free, order, siblings or {})
    placed: list[tuple[int, int]] = [(-1, -1)] * len(units)
    tight = _some_fit_not_all(units, nodes)
    turn = sorted(
        range(len(units)),
        key=lambda at: (-units[at].memory_bytes if tight else 0, units[at].replica, units[at].stage),
    )
    for at in turn:
        node = search.choose(units[at])
        if node is None:
            left = [slot for entry in free for slot, _ in entry.slots]
            return NothingFits(at, int(max(left, default=0)))
        placed[at] = (node, free[node].take(units[at].memory_bytes))
    return placed


def _place_by_labels(
    units: Sequence[NeededPlace],
    nodes: Sequence[NodeRoom],
    order: Sequence[str],
    siblings: Mapping[int, Collection[tuple[str, str]]],
) -> list[tuple[int, int]] | NothingFits:
    """Units for which fewest slots have the labels go first; the others get what is left."""
    known = defaultdict(list, {stage: list(places) for stage, places in siblings.items()})
    taken: dict[str, set[int]] = defaultdict(set)
    placed: list[tuple[int, int]] = [(-1, -1)] * len(units)

    def slots_with(labels: frozenset[str]) -> int:
        return sum(len(room.only(labels, ()).slots) for room in nodes)

    for labels in sorted({unit.labels for unit in units}, key=lambda each: (slots_with(each), sorted(each))):
        mine = [at for at, unit in enumerate(units) if unit.labels == labels]
        rooms = [room.only(labels, taken[room.sid]) for room in nodes]
        bare = [replace(units[at], labels=frozenset()) for at in mine]
        found = place_first(bare, rooms, order, known)
        if isinstance(found, NothingFits):
            return NothingFits(mine[found.unit], found.largest_bytes)
        for at, (node, slot) in zip(mine, found, strict=True):
            placed[at] = node, slot
            taken[nodes[node].sid].add(slot)
            known[units[at].stage].append((nodes[node].cluster, nodes[node].sid))
    return placed


def _some_fit_not_all(units: Sequence[NeededPlace], nodes: Sequence[NodeRoom]) -> bool:
    least = min((memory for room in nodes for _, memory in room.slots if memory), default=0)
    return bool(least) and max((unit.memory_bytes for unit in units), default=0) > least


class _ClusterHeaps:
    """Nodes of each cluster by preference, for each stage: fewest siblings, most free slots, SID.

    Free slots only become fewer and siblings only more, so an entry that is out of date is put back where it
    belongs when it comes up.
    """

    def __init__(
        self,
        free: Sequence[_Free],
        order: Sequence[str],
        siblings: Mapping[int, Collection[tuple[str, str]]],
    ) -> None:
        self._free, self._order = free, order
        self._rank = {cluster: rank for rank, cluster in enumerate(order)}
        self._nodes: dict[str, list[int]] = defaultdict(list)
        for number, entry in enumerate(free):
            self._nodes[entry.room.cluster].append(number)
        self._in_cluster: dict[tuple[int, str], int] = defaultdict(int)
        self._on_node: dict[tuple[int, str], int] = defaultdict(int)
        for stage, places in siblings.items():
            for cluster, sid in places:
                self._in_cluster[stage, cluster] += 1
                self._on_node[stage, sid] += 1
        self._heaps: dict[tuple[int, str], list[tuple[int, int, str, int]]] = {}

    def choose(self, unit: NeededPlace) -> int | None:
        """The node for a unit, counted among its siblings from now on; None: none has a slot that fits."""
        home = self._order[unit.replica % len(self._order)]
        best: tuple[tuple[int, bool, int, int, int, str], int] | None = None
        for cluster in self._nodes:
            outer = (self._in_cluster[unit.stage, cluster], cluster != home)
            if best is not None and outer > best[0][:2]:
                continue
            if (top := self._top(unit, cluster)) is None:
                continue
            key = (*outer, top[0], top[1], self._rank[cluster], top[2])
            if best is None or key < best[0]:
                best = (key, top[3])
        if best is None:
            return None
        room = self._free[best[1]].room
        self._in_cluster[unit.stage, room.cluster] += 1
        self._on_node[unit.stage, room.sid] += 1
        return best[1]

    def _top(self, unit: NeededPlace, cluster: str) -> tuple[int, int, str, int] | None:
        heap = self._heaps.get((unit.stage, cluster))
        if heap is None:
            heap = [self._entry(unit.stage, number) for number in self._nodes[cluster]]
            heapq.heapify(heap)
            self._heaps[unit.stage, cluster] = heap
        while heap:
            top = heap[0]
            if not self._free[top[3]].fits(unit.memory_bytes):
                heapq.heappop(heap)  # units of a stage need the same: nor will it fit the next one
            elif (now := self._entry(unit.stage, top[3])) != top:
                heapq.heapreplace(heap, now)
            else:
                return top
        return None

    def _entry(self, stage: int, number: int) -> tuple[int, int, str, int]:
        entry = self._free[number]
        return (self._on_node[stage, entry.room.sid], -len(entry.slots), entry.room.sid, number)
