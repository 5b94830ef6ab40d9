"""Which links lie between hosts: fat trees, dragonflies, GraphML files, lists of links, measured bandwidths.

Pure Python: the control plane has one, and `search.access_routes` makes routes of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from math import inf, isfinite
from statistics import median
from typing import Any
from xml.etree import ElementTree

from entities.planner.plan_request import NoPlan

GBPS = 1.25e5
"""Bytes per millisecond of 1 Gbit/s."""
MOST_PORTS = 64
"""Largest whole number in a topology file: a fat tree of 64 ports has 65,536 hosts."""


@dataclass(frozen=True)
class NetworkTopology:
    """Hosts and what connects them. `links`: bytes per millisecond by (node, node), in both directions."""

    hosts: tuple[str, ...]
    links: Mapping[tuple[str, str], float]

    def check_hosts(self, nodes: Iterable[str], name: str = "the topology") -> None:
        """Raises NoPlan: some nodes of the mesh are not among the hosts, or are not connected."""
        if unknown := sorted(set(nodes) - set(self.hosts)):
            raise NoPlan(
                f"{name} does not have {_listed(unknown)} of the mesh among its {len(self.hosts)} hosts "
                f"({_listed(self.hosts)}): name its hosts as the nodes are named"
            )


def fat_tree(
    arity: int, *, oversubscription: float = 1.0, gbps: float = 100.0, hosts: Sequence[str] = ()
) -> NetworkTopology:
    """A three-level fat tree of switches with `arity` ports (Al-Fares et al., 2008): arity³/4 hosts.

    Args:
        arity: even, at least 2.
        oversubscription: by how much links above the edge are thinner than those to hosts.
        gbps: of a host's link.
        hosts: their names, in order; none: `host-0`…
    """
    if arity < 2 or arity % 2 or oversubscription <= 0 or gbps <= 0:
        raise NoPlan("a fat tree has an even arity of at least 2, and positive oversubscription and gbps")
    half = arity // 2
    names = _host_names(hosts, arity * half * half)
    links: dict[tuple[str, str], float] = {}
    upper = gbps / oversubscription * GBPS
    for pod in range(arity):
        for edge in range(half):
            for host in range(half):
                links[names[(pod * half + edge) * half + host], f"edge-{pod}-{edge}"] = gbps * GBPS
            for aggregate in range(half):
                links[f"edge-{pod}-{edge}", f"aggregate-{pod}-{aggregate}"] = upper
        for aggregate in range(half):
            for core in range(half):
                links[f"aggregate-{pod}-{aggregate}", f"core-{aggregate}-{core}"] = upper
    return NetworkTopology(names, links)


def dragonfly(
    groups: int,
    routers: int,
    hosts_per_router: int,
    *,
    gbps: float = 100.0,
    global_gbps: float = 25.0,
    hosts: Sequence[str] = (),
) -> NetworkTopology:
    """A dragonfly (Kim et al., 2008): routers of a group all connected, one global link for each pair of
    groups."""
    if min(groups, routers, hosts_per_router) < 1 or min(gbps, global_gbps) <= 0:
        raise NoPlan("a dragonfly has at least one group, router and host, and positive gbps and global_gbps")
    names = _host_names(hosts, groups * routers * hosts_per_router)
    links: dict[tuple[str, str], float] = {}
    at = 0
    for group in range(groups):
        for router in range(routers):
            for _ in range(hosts_per_router):
                links[names[at], f"router-{group}-{router}"] = gbps * GBPS
                at += 1
            for other in range(router):
                links[f"router-{group}-{other}", f"router-{group}-{router}"] = gbps * GBPS
    for first in range(groups):
        for second in range(first + 1, groups):
            near, far = (second - first - 1) % (groups - 1), (first - second - 1) % (groups - 1)
            ends = (
                f"router-{first}-{near * routers // (groups - 1)}",
                f"router-{second}-{far * routers // (groups - 1)}",
            )
            links[ends] = global_gbps * GBPS
    return NetworkTopology(names, links)


def measured_topology(bytes_per_s: Mapping[tuple[str, str], float], hosts: Sequence[str]) -> NetworkTopology:
    """Hosts with a link for each measured pair; pairs without a measurement get the median."""
    usual = float(median(bytes_per_s.values())) if bytes_per_s else 1e9
    links = {}
    for at, first in enumerate(hosts):
        for second in hosts[at + 1 :]:
            found = [speed for pair in ((first, second), (second, first)) if (speed := bytes_per_s.get(pair))]
            links[first, second] = (min(found) if found else usual) / 1e3
    return NetworkTopology(tuple(hosts), links)


def topology_from(name: str, body: Mapping[str, Any]) -> NetworkTopology:
    """A topology as a file describes it: `kind: fat_tree | dragonfly | links`, and the arguments of that
    kind.

    `links` has `hosts: [NAME, …]` and `links: [{between: [A, B], gbps: N}, …]`; names that are no hosts are
    switches.

    Raises:
        NoPlan: what is wrong, and where.
    """
    kind = body.get("kind")
    if kind in ("fat_tree", "dragonfly"):
        make = fat_tree if kind == "fat_tree" else dragonfly
        try:
            return make(**_arguments(make, body))
        except NoPlan as refused:
            raise NoPlan(f"{name}: {refused}") from None
    if kind != "links":
        raise NoPlan(f"{name}: kind is {kind!r}; give fat_tree, dragonfly or links, or a GraphML file")
    links: dict[tuple[str, str], float] = {}
    for key in ("hosts", "links"):
        if not isinstance(body.get(key) or [], list):
            raise NoPlan(f"{name}: {key} is {body[key]!r}: give a list")
    for number, link in enumerate(body.get("links") or ()):
        try:
            first, second = link["between"]
            speed = float(link["gbps"])
        except (TypeError, KeyError, ValueError):
            raise NoPlan(f"{name}: links[{number}] needs between: [A, B] and gbps: a number") from None
        if not 0 < speed < inf:
            raise NoPlan(f"{name}: links[{number}] has gbps {speed:g}; give a number above 0")
        links[str(first), str(second)] = speed * GBPS
    hosts = tuple(dict.fromkeys(map(str, body.get("hosts") or ())))
    ends = {end for link in links for end in link}
    if unknown := [host for host in hosts if host not in ends]:
        raise NoPlan(f"{name}: no link has {_listed(unknown)}, which hosts names: give each host a link")
    if not hosts:
        raise NoPlan(f"{name}: hosts is empty: name the nodes of the mesh that the links connect")
    return NetworkTopology(hosts, links)


def _arguments(make: Callable[..., NetworkTopology], body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file, as this kind takes them. Raises NoPlan: one is unknown, missing or of another
    type."""
    given = {key: value for key, value in body.items() if key != "kind"}
    fields = signature(make).parameters
    known = f"{body['kind']} has {', '.join(fields)}"
    if unknown := [key for key in given if key not in fields]:
        raise NoPlan(f"{unknown[0]}: unknown field; {known}")
    if missing := [
        key for key, field in fields.items() if field.default is Parameter.empty and key not in given
    ]:
        raise NoPlan(f"{missing[0]} is missing; {known}")
    for key, value in given.items():
        if key == "hosts":
            if not isinstance(value, list) or len(set(map(str, value))) < len(value):
                raise NoPlan("hosts: give a list of names, none of them twice")
        elif fields[key].annotation == "int":
            if type(value) is not int or abs(value) > MOST_PORTS:
                raise NoPlan(f"{key} is {value!r}: give a whole number of at most {MOST_PORTS}")
        elif type(value) not in (int, float) or not isfinite(value):
            raise NoPlan(f"{key} is {value!r}: give a number")
    return given


def topology_from_graphml(name: str, text: str) -> NetworkTopology:
    """A GraphML file, as of the Internet Topology Zoo: nodes are hosts, by their label.

    Nodes with a `type` other than `host` are switches. A link has `LinkSpeedRaw` (bit/s), else the median
    one's; parallel links add up.

    Raises:
        NoPlan: it is not GraphML, or has no link, or an edge names a node that is not there.
    """
    if "<!ENTITY" in text or "<!DOCTYPE" in text:
        raise NoPlan(f"{name}: declares entities, which no GraphML needs: remove the DOCTYPE")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise NoPlan(f"{name}: not XML ({error}): give a GraphML file, or YAML with kind") from None
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    keys = {key.get("id"): key.get("attr.name") for key in root.iter(f"{space}key")}

    def data(element: ElementTree.Element) -> dict[str | None, str]:
        return {keys.get(item.get("key")): item.text or "" for item in element.iter(f"{space}data")}

    labels: dict[str, str] = {}
    hosts = []
    for node in root.iter(f"{space}node"):
        fields = data(node)
        label = fields.get("label") or node.get("id") or ""
        labels[node.get("id") or ""] = label if label not in labels.values() else f"{label}-{node.get('id')}"
        if fields.get("type", "host") == "host":
            hosts.append(labels[node.get("id") or ""])
    parallel: dict[tuple[str, str], list[float]] = defaultdict(list)
    for edge in root.iter(f"{space}edge"):
        ends = edge.get("source") or "", edge.get("target") or ""
        if unknown := [end for end in ends if end not in labels]:
            raise NoPlan(f"{name}: an edge ends at node {unknown[0]!r}, which the file does not have")
        first, second = sorted(labels[end] for end in ends)
        if first != second:
            parallel[first, second].append(_link_speed(name, first, second, data(edge).get("LinkSpeedRaw")))
    if not parallel:
        raise NoPlan(f"{name}: has no edge between two nodes: give a GraphML file with links")
    if not hosts:
        raise NoPlan(f"{name}: all its nodes are of another type than host: name the nodes of the mesh")
    known = [speed for speeds in parallel.values() for speed in speeds if speed]
    usual = float(median(known)) if known else 100 * GBPS
    return NetworkTopology(
        tuple(hosts), {link: sum(speed or usual for speed in speeds) for link, speeds in parallel.items()}
    )


def _link_speed(name: str, first: str, second: str, text: str | None) -> float:
    """Bytes per millisecond of a link; 0: not known. Raises NoPlan: it is no number."""
    try:
        speed = float(text or 0)
    except ValueError:
        speed = -1.0
    if not 0 <= speed < inf:
        raise NoPlan(
            f"{name}: LinkSpeedRaw between {first} and {second} is {text}: give bit/s, or leave it out"
        )
    return speed / 8e3


def distances(topology: NetworkTopology, host_of: Mapping[str, Iterable[str]]) -> dict[str, dict[str, int]]:
    """How many links lie between clusters: the fewest between any of their hosts; 0 on one machine.

    Args:
        topology: of the mesh.
        host_of: the hosts of each cluster.

    Returns:
        By cluster and cluster, without pairs that nothing connects.
    """
    beside = neighbours(topology)
    hosts = {cluster: {host for host in mine if host in beside} for cluster, mine in host_of.items()}
    found: dict[str, dict[str, int]] = {}
    for cluster, mine in hosts.items():
        far: dict[str, int] = {}
        for host in mine:
            for other, links in shortest(beside, host)[1].items():
                far[other] = min(far.get(other, links), links)
        found[cluster] = {
            other: min(far[host] for host in theirs if host in far)
            for other, theirs in hosts.items()
            if other != cluster and any(host in far for host in theirs)
        }
    return found


def neighbours(topology: NetworkTopology) -> dict[str, dict[str, float]]:
    """What each node is linked to, and the link's bytes per millisecond."""
    beside: dict[str, dict[str, float]] = defaultdict(dict)
    for (first, second), speed in topology.links.items():
        beside[first][second] = beside[second][first] = speed
    return beside


def shortest(
    beside: Mapping[str, Mapping[str, float]], source: str
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """For each node that is reached: those before it on shortest paths, and how many links it is away."""
    far, before = {source: 0}, {source: list[str]()}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for other in beside[node]:
            if other not in far:
                far[other] = far[node] + 1
                before[other] = []
                queue.append(other)
            if far[other] == far[node] + 1:
                before[other].append(node)
    return before, far


def _host_names(hosts: Sequence[str], count: int) -> tuple[str, ...]:
    if hosts and len(hosts) > count:
        raise NoPlan(f"hosts names {len(hosts)}, but this topology has places for {count}: make it larger")
    return tuple(map(str, hosts)) + tuple(f"host-{number}" for number in range(len(hosts), count))


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
