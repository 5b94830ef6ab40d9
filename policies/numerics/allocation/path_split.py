"""The split of demands over paths, and the resulting utilisation of links (pure, vectorised).

A *network* has directed links with capacities. Each demand, between two of its nodes, has a few *paths*, and
a split gives the share of the demand on each path. The utilisation of a link is its flow divided by its
capacity; traffic engineering minimises the greatest one: B4, Jain et al. (2013), doi:10.1145/2486001.2486019;
SMORE, Kumar et al. (2018).

`topology-scoring` splits a stage's microbatches with it; the benchmarks and `policies.contrib` use it for
networks of other kinds.

Shapes: D demands, at most K paths each, E links, N (path, link) incidences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Paths:
    """Demands, their paths and the links of these. `paths_of` makes it.

    Attributes:
        capacity: Capacity of each link, `(E,)`, above 0, in the unit of the demands.
        present: `(D, K)` bool; a demand with fewer than K paths has False at its end.
        path: `(N,)` the path, as an index into the flattened `(D, K)`; ascending.
        link: `(N,)` the link that the path uses.
        begins: `(D·K,)` where the links of each path begin in `link`; an absent path has one entry, the
            link E, which does not exist.
        hops: `(D, K)` links per path.
        narrowest: `(D, K)` the least capacity on each path; 1 for an absent path.
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
        # Computed once, since a hundred utilisations of the same paths would compute it again each time.
        hops = np.bincount(self.path, minlength=self.present.size).reshape(self.present.shape)
        full = self.greatest(1.0 / self.capacity)
        order = np.argsort(self.link, kind="stable")
        order = order[self.link[order] < len(self.capacity)]
        used, begins = np.unique(self.link[order], return_index=True)
        derived = {
            "hops": hops.astype(float),
            "narrowest": np.where(full > 0, 1.0 / np.where(full > 0, full, 1.0), 1.0),
            "_by_link": self.path[order],
            "_used": used,
            "_link_begins": begins,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def demands(self) -> int:
        return int(self.present.shape[0])

    def without(self, links: Sequence[int]) -> Paths:
        """The same paths without those over lost links; a demand that would lose all paths keeps them."""
        lost = np.zeros(len(self.capacity) + 1, dtype=bool)
        lost[list(links)] = True
        broken = np.logical_or.reduceat(lost[self.link], self.begins).reshape(self.present.shape)
        present = self.present & ~broken
        present = np.where(present.any(axis=1, keepdims=True), present, self.present)
        return Paths(self.capacity, present, self.path, self.link, self.begins)

    def utilisation(self, demand: Floats, split: Floats) -> Floats:
        """Utilisation of each link, `(E,)`, for demands `(D,)` and a split `(D, K)`."""
        flow = (demand[:, None] * split).ravel()
        load = np.zeros(len(self.capacity))
        if self._used.size:
            load[self._used] = np.add.reduceat(flow[self._by_link], self._link_begins)
        return np.asarray(load / self.capacity)

    def worst(self, demand: Floats, split: Floats) -> float:
        """The greatest utilisation of a link."""
        return float(self.utilisation(demand, split).max(initial=0.0))

    def greatest(self, values: Floats) -> Floats:
        """The greatest of the links' values on each path, `(D, K)`; 0 for an absent path."""
        padded = np.append(values, 0.0)
        return np.maximum.reduceat(padded[self.link], self.begins).reshape(self.present.shape)

    def total(self, values: Floats) -> Floats:
        """The sum of the links' values on each path, `(D, K)`."""
        padded = np.append(values, 0.0)
        return np.add.reduceat(padded[self.link], self.begins).reshape(self.present.shape)

    # --- splits without measurements --------------------------------------------------------------------
    def shortest(self) -> Floats:
        """Puts all of each demand on its first path."""
        split = np.zeros(self.present.shape)
        split[np.arange(self.demands), self.present.argmax(axis=1)] = 1.0
        return split

    def equal_cost(self) -> Floats:
        """ECMP: equal shares on the paths with the fewest links."""
        hops = np.where(self.present, self.hops, np.inf)
        fewest = (hops == hops.min(axis=1, keepdims=True)).astype(float)
        return np.asarray(fewest / fewest.sum(axis=1, keepdims=True))

    def rescaled(self, split: Floats) -> Floats:
        """Adapts a split made for more paths: the shares of lost paths go to the others in proportion."""
        rest = np.where(self.present, split, 0.0)
        total = rest.sum(axis=1, keepdims=True)
        equal = self.present / self.present.sum(axis=1, keepdims=True)
        return np.where(total > 0, rest / np.where(total > 0, total, 1.0), equal)


def paths_of(capacity: Floats, routes: Sequence[Sequence[Sequence[int]]]) -> Paths:
    """Paths given as sequences of links, by their index in `capacity`."""
    wide = max((len(demand) for demand in routes), default=1)
    present = np.zeros((len(routes), wide), dtype=bool)
    path: list[int] = []
    link: list[int] = []
    begins: list[int] = []
    for row, demand in enumerate(routes):
        for column in range(wide):
            begins.append(len(link))
            exists = column < len(demand)
            present[row, column] = exists
            path_links = list(demand[column]) if exists else [len(capacity)]
            path += [row * wide + column] * len(path_links)
            link += path_links
    return Paths(capacity, present, np.array(path), np.array(link), np.array(begins))
