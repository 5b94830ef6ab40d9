"""Networks from GraphML files of the Internet Topology Zoo, and random traffic for them.

See Knight et al., 2011, doi:10.1109/JSAC.2011.111002.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from xml.etree import ElementTree

import numpy as np

from policies.numerics.allocation.path_split import Floats, Paths, paths_of

Link = tuple[int, int]
"""Source and target node of a directed link."""

PATHS = 4
"""Paths of each demand: the shortest by number of links."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A connected network. `capacity`: capacities of its directed links, in units of the median link's."""

    name: str
    nodes: int
    capacity: dict[Link, float]
    places: tuple[tuple[float, float], ...]
    """(longitude, latitude) by node; NaN if the file has none."""

    @property
    def pairs(self) -> list[Link]:
        """Source and target of each demand, in order."""
        return [
            (source, target)
            for source in range(self.nodes)
            for target in range(self.nodes)
            if source != target
        ]

    def paths(self, count: int = PATHS) -> Paths:
        """The `count` shortest paths of every pair."""
        routes = [shortest_paths(self.capacity, source, target, count) for source, target in self.pairs]
        return paths_over(self.capacity, routes)


def gravity(rng: np.random.Generator, nodes: int) -> Floats:
    """A random traffic matrix without its diagonal, `(nodes·(nodes-1),)`, mean 1.

    The traffic that a node sends and takes is log-normal, and so is each pair's deviation from their product
    (Roughan, 2005, doi:10.1145/1096536.1096551).
    """
    sends = rng.lognormal(0, 1, nodes)
    takes = sends * rng.lognormal(0, 0.5, nodes)
    matrix = np.outer(sends, takes) * rng.lognormal(0, 0.5, (nodes, nodes))
    demands: Floats = matrix[~np.eye(nodes, dtype=bool)]
    demands /= demands.mean()
    return demands


def read_topology(name: str, text: bytes) -> Topology | None:
    """The largest connected part of a GraphML file; None if it has no link.

    Parallel links add up; a link without `LinkSpeedRaw` counts as the median one.

    Raises:
        ElementTree.ParseError, ValueError: The text is not GraphML.
    """
    root = ElementTree.fromstring(text)
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    keys = {key.get("id"): key.get("attr.name") for key in root.iter(f"{space}key")}
    places: dict[str, tuple[float, float]] = {}
    for node in root.iter(f"{space}node"):
        data = {keys.get(item.get("key")): item.text or "" for item in node.iter(f"{space}data")}
        at = (float(data.get("Longitude") or "nan"), float(data.get("Latitude") or "nan"))
        places[node.get("id") or ""] = at
    links: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for edge in root.iter(f"{space}edge"):
        data = {keys.get(item.get("key")): item.text or "" for item in edge.iter(f"{space}data")}
        source, target = edge.get("source") or "", edge.get("target") or ""
        if source != target:
            speed = float(data.get("LinkSpeedRaw") or 0) or None
            links[min(source, target), max(source, target)].append(speed)
    if not links:
        return None
    speeds = [speed for parallel in links.values() for speed in parallel if speed is not None]
    usual = median(speeds) if speeds else 1.0
    part = max(_parts(list(places), list(links)), key=lambda nodes: len(nodes))
    order = {node: index for index, node in enumerate(sorted(part))}
    capacity: dict[Link, float] = {}
    for (source, target), parallel in sorted(links.items()):
        if source in order:
            total = sum(speed or usual for speed in parallel) / usual
            capacity[order[source], order[target]] = capacity[order[target], order[source]] = total
    return Topology(name, len(order), capacity, tuple(places[node] for node in order))


def _parts(nodes: list[str], links: list[tuple[str, str]]) -> list[set[str]]:
    """Connected components."""
    neighbours: dict[str, set[str]] = {node: set() for node in nodes}
    for source, target in links:
        neighbours[source].add(target)
        neighbours[target].add(source)
    parts, visited = [], set[str]()
    for node in nodes:
        if node in visited:
            continue
        part, edge = {node}, [node]
        while edge:
            for other in neighbours[edge.pop()] - part:
                part.add(other)
                edge.append(other)
        visited |= part
        parts.append(part)
    return parts


# --- paths through a network ----------------------------------------------------------------------------
def paths_over(capacity: Mapping[Link, float], routes: Sequence[Sequence[Sequence[int]]]) -> Paths:
    """Paths given as sequences of nodes.

    Args:
        capacity: Capacity of each directed link.
        routes: The paths of each demand, best first; each demand has at least one.

    Raises:
        KeyError: A path uses a link that does not exist.
    """
    order = {link: index for index, link in enumerate(capacity)}
    return paths_of(
        np.array(list(capacity.values()), dtype=float),
        [[[order[link] for link in pairwise(route)] for route in demand] for demand in routes],
    )


def shortest_paths(capacity: Mapping[Link, float], source: int, target: int, count: int) -> list[list[int]]:
    """The `count` shortest simple paths by number of links (Yen, 1971); fewer if there are no more."""
    successors: dict[int, list[int]] = {}
    for begin, end in capacity:
        successors.setdefault(begin, []).append(end)
    first = _shortest(successors, source, target, frozenset(), frozenset())
    paths = [first] if first else []
    candidates: list[tuple[int, list[int]]] = []
    while paths and len(paths) < count:
        last = paths[-1]
        for turn in range(len(last) - 1):
            root = last[: turn + 1]
            used_links = frozenset(
                (path[turn], path[turn + 1])
                for path in paths
                if path[: turn + 1] == root and len(path) > turn + 1
            )
            rest = _shortest(successors, root[-1], target, frozenset(root[:-1]), used_links)
            if rest and (len(root) + len(rest) - 1, whole := root[:-1] + rest) not in candidates:
                heapq.heappush(candidates, (len(whole), whole))
        while candidates and candidates[0][1] in paths:
            heapq.heappop(candidates)
        if not candidates:
            break
        paths.append(heapq.heappop(candidates)[1])
    return paths


def _shortest(
    successors: Mapping[int, Sequence[int]],
    source: int,
    target: int,
    closed_nodes: frozenset[int],
    closed_links: frozenset[Link],
) -> list[int]:
    """The shortest path that avoids some nodes and links, by breadth-first search; empty: there is none."""
    before = {source: source}
    edge = [source]
    while edge and target not in before:
        next_edge = []
        for node in edge:
            for other in successors.get(node, ()):
                if other not in before and other not in closed_nodes and (node, other) not in closed_links:
                    before[other] = node
                    next_edge.append(other)
        edge = next_edge
    if target not in before:
        return []
    path = [target]
    while path[-1] != source:
        path.append(before[path[-1]])
    return path[::-1]
