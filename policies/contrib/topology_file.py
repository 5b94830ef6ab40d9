"""Networks from GraphML files, as the Internet Topology Zoo has them (Knight et al., 2011,
doi:10.1109/JSAC.2011.111002), and drawn traffic for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from xml.etree import ElementTree

import numpy as np

from policies.numerics.path_split import Floats, Link, Paths, paths_over, shortest_paths

PATHS = 4
"""Of each demand: the shortest by number of links."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A connected network. `capacity`: of its directed links, in units of the median link's."""

    name: str
    nodes: int
    capacity: dict[Link, float]
    places: tuple[tuple[float, float], ...]
    """(longitude, latitude) by node; NaN where the file does not tell."""

    @property
    def pairs(self) -> list[Link]:
        """Whose demand is which: source and target."""
        return [(one, other) for one in range(self.nodes) for other in range(self.nodes) if one != other]

    def paths(self, count: int = PATHS) -> Paths:
        """The `count` shortest of every pair."""
        routes = [shortest_paths(self.capacity, one, other, count) for one, other in self.pairs]
        return paths_over(self.capacity, routes)


def gravity(rng: np.random.Generator, nodes: int) -> Floats:
    """A drawn traffic matrix without its diagonal, `(nodes·(nodes-1),)`, mean 1.

    What a node sends and takes is log-normal, and so is how each pair departs from their product (Roughan,
    2005, doi:10.1145/1096536.1096551).
    """
    sends = rng.lognormal(0, 1, nodes)
    takes = sends * rng.lognormal(0, 0.5, nodes)
    matrix = np.outer(sends, takes) * rng.lognormal(0, 0.5, (nodes, nodes))
    found: Floats = matrix[~np.eye(nodes, dtype=bool)]
    found /= found.mean()
    return found


def read_topology(name: str, text: bytes) -> Topology | None:
    """The largest connected part of a GraphML file; None if it has no link.

    Parallel links add up; where no `LinkSpeedRaw` is told, the median one counts.

    Raises:
        ElementTree.ParseError, ValueError: it is something else.
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
        one, other = edge.get("source") or "", edge.get("target") or ""
        if one != other:
            speed = float(data.get("LinkSpeedRaw") or 0) or None
            links[min(one, other), max(one, other)].append(speed)
    if not links:
        return None
    told = [speed for parallel in links.values() for speed in parallel if speed is not None]
    usual = median(told) if told else 1.0
    part = max(_parts(list(places), list(links)), key=lambda one: len(one))
    order = {node: index for index, node in enumerate(sorted(part))}
    capacity: dict[Link, float] = {}
    for (one, other), parallel in sorted(links.items()):
        if one in order:
            total = sum(speed or usual for speed in parallel) / usual
            capacity[order[one], order[other]] = capacity[order[other], order[one]] = total
    return Topology(name, len(order), capacity, tuple(places[node] for node in order))


def _parts(nodes: list[str], links: list[tuple[str, str]]) -> list[set[str]]:
    """Connected components."""
    near: dict[str, set[str]] = {node: set() for node in nodes}
    for one, other in links:
        near[one].add(other)
        near[other].add(one)
    parts, seen = [], set[str]()
    for node in nodes:
        if node in seen:
            continue
        part, edge = {node}, [node]
        while edge:
            for other in near[edge.pop()] - part:
                part.add(other)
                edge.append(other)
        seen |= part
        parts.append(part)
    return parts
