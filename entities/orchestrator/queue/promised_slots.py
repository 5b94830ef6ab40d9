"""Which slots are promised to which job: of thousands of jobs few change between two looks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from entities.orchestrator.queue.slot_holder import SlotHolder
from schemas.task_graph import Placement

Node = tuple[str, str]
"""Cluster and node."""


class PromisedSlots:
    """The placements of all runs by node. `holders`: the jobs that have not ended, by id."""

    def __init__(self, holders: Mapping[str, SlotHolder]) -> None:
        self._holders = holders
        self._seen: dict[str, Sequence[Placement]] = {}
        self._on: dict[Node, tuple[Placement, ...]] = {}

    def to_others(self, job: str) -> dict[Node, tuple[Placement, ...]]:
        """The placements that take slots, of all jobs but this one. What is returned changes no more."""
        self._follow()
        found = dict(self._on)
        mine = {id(place) for place in self._seen.get(job, ())}
        for place in self._seen.get(job, ()):
            node = place.cluster, place.node
            if node in found:
                found[node] = tuple(other for other in found[node] if id(other) not in mine)
        return found

    def _follow(self) -> None:
        """Takes in what has changed since the last call: a job with other placements has another sequence."""
        seen, changed = self._seen, []
        for name, run in self._holders.items():
            if seen.get(name) is not (places := run.placements):
                changed.append((name, places))
        gone = [seen[name] for name, _ in changed if name in seen]
        seen.update(changed)
        if len(seen) > len(self._holders):
            gone += [seen.pop(name) for name in [*seen] if name not in self._holders]
        left: dict[Node, set[int]] = defaultdict(set)
        for places in gone:
            for place in places:
                left[place.cluster, place.node].add(id(place))
        for node, places_left in left.items():
            if kept := tuple(place for place in self._on.get(node, ()) if id(place) not in places_left):
                self._on[node] = kept
            else:
                self._on.pop(node, None)
        new: dict[Node, list[Placement]] = defaultdict(list)
        for _, places in changed:
            for place in places:
                if place.slot >= 0:
                    new[place.cluster, place.node].append(place)
        for node, added in new.items():
            self._on[node] = (*self._on.get(node, ()), *added)
