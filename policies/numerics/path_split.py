"""How demands split over their paths, and what that does to the links of a network (pure, vectorised).

A *network* has directed links with capacities; each demand, between two of its nodes, has a few *paths*,
and a split says what part of it goes on each. The utilisation of a link is what flows over it beside its
capacity, and the greatest one is what traffic engineering minimises: B4, Jain et al. (2013),
doi:10.1145/2486001.2486019; SMORE, Kumar et al. (2018).

Shapes: D demands, K paths each at most, E links, N (path, link) incidences.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Paths:
    """Demands, their paths and the links of these. Made by `paths_over`.

    Attributes:
        capacity: of each link, `(E,)`, above 0, in the unit of the demands.
        present: `(D, K)` bool; a demand with fewer than K paths has False at its end.
        path: `(N,)` which path, as an index into the flattened `(D, K)`; ascending.
        link: `(N,)` which link it uses.
        begins: `(D·K,)` where the links of each path begin in `link`; a path that is not present has one
            entry, the link E, which is none.
        hops: `(D, K)` links per path.
        narrowest: `(D, K)` the least capacity on each path; 1 where there is no path.
    """

    capacity: Floats
    present: Bools
    path: Ints
    link: Ints
    begins: Ints
    hops: Floats = field(init=False, repr=False)
    narrowest: Floats = field(init=False, repr=False)
    _by_link: Ints = field(init=False, repr=False)
    _used: Ints = field(init=False, repr=False)
    _link_begins: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # What a hundred utilisations of the same paths would find again each time.
        hops = np.bincount(self.path, minlength=self.present.size).reshape(self.present.shape)
        full = self.greatest(1.0 / self.capacity)
        order = np.argsort(self.link, kind="stable")
        order = order[self.link[order] < len(self.capacity)]
        used, begins = np.unique(self.link[order], return_index=True)
        found = {
            "hops": hops.astype(float),
            "narrowest": np.where(full > 0, 1.0 / np.where(full > 0, full, 1.0), 1.0),
            "_by_link": self.path[order],
            "_used": used,
            "_link_begins": begins,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def demands(self) -> int:
        return int(self.present.shape[0])

    def without(self, links: Sequence[int]) -> Paths:
        """The same with some links lost: the paths over them are not present, unless none would be left."""
        lost = np.zeros(len(self.capacity) + 1, dtype=bool)
        lost[list(links)] = True
        broken = np.logical_or.reduceat(lost[self.link], self.begins).reshape(self.present.shape)
        left = self.present & ~broken
        left = np.where(left.any(axis=1, keepdims=True), left, self.present)
        return Paths(self.capacity, left, self.path, self.link, self.begins)

    def utilisation(self, demand: Floats, split: Floats) -> Floats:
        """Of each link, `(E,)`, for demands `(D,)` and a split `(D, K)`."""
        flow = (demand[:, None] * split).ravel()
        load = np.zeros(len(self.capacity))
        if self._used.size:
            load[self._used] = np.add.reduceat(flow[self._by_link], self._link_begins)
        return np.asarray(load / self.capacity)

    def worst(self, demand: Floats, split: Floats) -> float:
        """The greatest utilisation of a link."""
        return float(self.utilisation(demand, split).max(initial=0.0))

    def greatest(self, values: Floats) -> Floats:
        """The greatest of the links' values on each path, `(D, K)`; 0 where there is no path."""
        padded = np.append(values, 0.0)
        return np.maximum.reduceat(padded[self.link], self.begins).reshape(self.present.shape)

    def total(self, values: Floats) -> Floats:
        """The sum of the links' values on each path, `(D, K)`."""
        padded = np.append(values, 0.0)
        return np.add.reduceat(padded[self.link], self.begins).reshape(self.present.shape)

    # --- splits that measure nothing --------------------------------------------------------------------
    def shortest(self) -> Floats:
        """All of each demand on its first path."""
        split = np.zeros(self.present.shape)
        split[np.arange(self.demands), self.present.argmax(axis=1)] = 1.0
        return split

    def equal_cost(self) -> Floats:
        """ECMP: equal parts on the paths with the fewest links."""
        hops = np.where(self.present, self.hops, np.inf)
        fewest = (hops == hops.min(axis=1, keepdims=True)).astype(float)
        return np.asarray(fewest / fewest.sum(axis=1, keepdims=True))

    def rescaled(self, split: Floats) -> Floats:
        """A split made for other paths: what went on lost ones goes on the rest in proportion."""
        kept = np.where(self.present, split, 0.0)
        total = kept.sum(axis=1, keepdims=True)
        equal = self.present / self.present.sum(axis=1, keepdims=True)
        return np.where(total > 0, kept / np.where(total > 0, total, 1.0), equal)


def paths_over(capacity: Mapping[Link, float], routes: Sequence[Sequence[Sequence[int]]]) -> Paths:
    """Paths given as sequences of nodes.

    Args:
        capacity: of each directed link.
        routes: of each demand its paths, best first; each has at least one.

    Raises:
        KeyError: a path uses a link that is not there.
    """
    order = {link: index for index, link in enumerate(capacity)}
    return paths_of(
        np.array(list(capacity.values()), dtype=float),
        [[[order[link] for link in pairwise(route)] for route in demand] for demand in routes],
    )


def paths_of(capacity: Floats, routes: Sequence[Sequence[Sequence[int]]]) -> Paths:
    """Paths given as sequences of links, by their place in `capacity`."""
    wide = max((len(demand) for demand in routes), default=1)
    present = np.zeros((len(routes), wide), dtype=bool)
    path: list[int] = []
    link: list[int] = []
    begins: list[int] = []
    for row, demand in enumerate(routes):
        for column in range(wide):
            begins.append(len(link))
            there = column < len(demand)
            present[row, column] = there
            used = list(demand[column]) if there else [len(capacity)]
            path += [row * wide + column] * len(used)
            link += used
    return Paths(capacity, present, np.array(path), np.array(link), np.array(begins))


def shortest_paths(capacity: Mapping[Link, float], source: int, target: int, count: int) -> list[list[int]]:
    """The `count` shortest simple paths by number of links (Yen, 1971); fewer where there are no more."""
    onward: dict[int, list[int]] = {}
    for one, other in capacity:
        onward.setdefault(one, []).append(other)
    first = _shortest(onward, source, target, frozenset(), frozenset())
    found = [first] if first else []
    waiting: list[tuple[int, list[int]]] = []
    while found and len(found) < count:
        last = found[-1]
        for turn in range(len(last) - 1):
            root = last[: turn + 1]
            taken = frozenset(
                (path[turn], path[turn + 1])
                for path in found
                if path[: turn + 1] == root and len(path) > turn + 1
            )
            rest = _shortest(onward, root[-1], target, frozenset(root[:-1]), taken)
            if rest and (len(root) + len(rest) - 1, whole := root[:-1] + rest) not in waiting:
                heapq.heappush(waiting, (len(whole), whole))
        while waiting and waiting[0][1] in found:
            heapq.heappop(waiting)
        if not waiting:
            break
        found.append(heapq.heappop(waiting)[1])
    return found


def _shortest(
    onward: Mapping[int, Sequence[int]],
    source: int,
    target: int,
    closed: frozenset[int],
    taken: frozenset[Link],
) -> list[int]:
    """The shortest way around some nodes and links, by breadth; empty: there is none."""
    before = {source: source}
    edge = [source]
    while edge and target not in before:
        further = []
        for node in edge:
            for other in onward.get(node, ()):
                if other not in before and other not in closed and (node, other) not in taken:
                    before[other] = node
                    further.append(other)
        edge = further
    if target not in before:
        return []
    way = [target]
    while way[-1] != source:
        way.append(before[way[-1]])
    return way[::-1]
