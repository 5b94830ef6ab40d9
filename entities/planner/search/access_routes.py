"""The links that traffic between hosts takes: all shortest paths in equal parts (ECMP).

Hosts that hang on one switch share its routes, so what is kept is routes between access points, not between
hosts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from entities.planner.network_topology import NetworkTopology, neighbours, shortest
from entities.planner.plan_request import NoPlan
from entities.planner.search.layer_chain import Floats

MOST_ROUTES = 100_000_000
"""Numbers that routes between access points may take."""


class AccessRoutes:
    """Shortest paths between access points: a host with one link hangs on its neighbour, others on
    themselves.

    Attributes:
        access: access point of each host.
        host_capacity: bytes per ms of each host's one link; infinite where it has several.
        shares: `(points, points, links)`: which part of what goes from one to another each directed link
            carries.
        capacity: of these links, bytes per ms.
        links: their ends.
    """

    def __init__(self, topology: NetworkTopology, hosts: Sequence[str]) -> None:
        beside = neighbours(topology)
        self.host_capacity: Floats = np.full(len(hosts), np.inf)
        points: dict[str, int] = {}
        access = []
        for number, host in enumerate(hosts):
            point = host
            if len(beside[host]) == 1:
                ((point, speed),) = beside[host].items()
                if len(beside[point]) == 1:
                    point = host
                else:
                    self.host_capacity[number] = speed
            access.append(points.setdefault(point, len(points)))
        self.access = np.array(access, dtype=int)
        inner = [
            (first, second)
            for first in sorted(beside)
            for second in sorted(beside[first])
            if all(len(beside[end]) > 1 or end in points for end in (first, second))
        ]
        self.links = inner
        if len(points) ** 2 * max(1, len(inner)) > MOST_ROUTES:
            raise NoPlan(
                f"the topology has {len(points)} access points and {len(inner)} links, too many for routes: "
                "give one with fewer, or place without it"
            )
        self.capacity: Floats = np.array([beside[first][second] for first, second in inner])
        number_of = {link: number for number, link in enumerate(inner)}
        self.shares = np.zeros((len(points), len(points), len(inner)))
        for source, row in points.items():
            before, far = shortest(beside, source)
            for target, column in points.items():
                if target not in far:
                    raise NoPlan(f"the topology has no way from {source} to {target}: connect them")
                self._spread(row, column, target, before, far, number_of)

    def _spread(
        self,
        row: int,
        column: int,
        target: str,
        before: Mapping[str, Sequence[str]],
        far: Mapping[str, int],
        number_of: Mapping[tuple[str, str], int],
    ) -> None:
        level = {target: 1.0}
        for _ in range(far[target]):
            nearer: dict[str, float] = defaultdict(float)
            for node, part in level.items():
                for other in before[node]:
                    share = part / len(before[node])
                    self.shares[row, column, number_of[other, node]] += share
                    nearer[other] += share
            level = nearer
