"""Which clusters a router or gateway serves: its own, and guests, which have none of its kind.

A machine may join under the name of a cluster that has no router, and a cluster's own may die for good. All
routers decide by the same records of the registry, so they agree without asking one another (ADR-0058).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from entities.presence.registry_view import RegistryView
from schemas.envelope import EntityKind
from schemas.registry import InstanceState, ServiceRecord

LIVING = (InstanceState.PENDING, InstanceState.ACTIVE)


def server_of(cluster: str, serving: Collection[str]) -> str | None:
    """The cluster whose router (or gateway) serves `cluster`; None if there is none in the whole mesh. Pure.

    `serving`: the clusters that have one. A cluster without one goes to that of highest random weight
    (Thaler and Ravishankar 1998): no distance is known before something runs there, guests are spread over
    all, and few change hands when a router comes or goes.
    """
    if cluster in serving:
        return cluster
    return max(serving, key=lambda server: (_weight(cluster, server), server), default=None)


def _weight(cluster: str, server: str) -> bytes:
    return hashlib.sha256(f"{cluster}/{server}".encode()).digest()


def serving_clusters(kind: EntityKind, records: Iterable[ServiceRecord]) -> frozenset[str]:
    """The clusters that have a living router, or gateway, of their own."""
    return frozenset(
        record.endpoint.cluster for record in records if record.kind is kind and record.state in LIVING
    )


class ServiceArea:
    """The area of the router, or gateway, of one cluster, by a registry view that others keep current."""

    def __init__(self, view: RegistryView, kind: EntityKind, cluster: str) -> None:
        self._view = view
        self._kind = kind
        self._own = cluster
        self._serving: frozenset[str] = frozenset()
        self.guests: frozenset[str] = frozenset()

    def review(self) -> frozenset[str]:
        """Decides again which guests it has; returns the clusters that came or went."""
        before, self._serving = self.guests, serving_clusters(self._kind, self._view.entities())
        self.guests = frozenset(
            cluster
            for cluster in self._view.clusters() - self._serving - {self._own}
            if server_of(cluster, self._serving) == self._own
        )
        return before ^ self.guests

    def covers(self, cluster: str) -> bool:
        return cluster == self._own or cluster in self.guests

    def has_none(self, cluster: str) -> bool:
        """Whether a cluster has no living router (or gateway) of its own."""
        return cluster not in self._serving

    def instances(self) -> tuple[ServiceRecord, ...]:
        """The instances of all clusters of this area."""
        return tuple(
            record
            for cluster in (self._own, *sorted(self.guests))
            for record in self._view.instances(cluster=cluster)
        )
