"""SRD, service registry and discovery (draft §3): one registry leads, any number of others stand by.

Registrations are leased records in the bucket `registry`, which is the source of truth: a new leader reads it
and goes on. Each answered change is in it. The decisions are in `core.py`; the work of a leader is in
`leader.py`.
"""

from __future__ import annotations

import asyncio

from bus.connection import Bus
from entities.election.leader_service import LeaderService
from entities.service_registry.core import RegistryCore
from entities.service_registry.leader import RegistryLeader, ServiceRegistryConfig
from schemas.envelope import EntityKind

__all__ = ["ServiceRegistry", "ServiceRegistryConfig"]


class ServiceRegistry(LeaderService[RegistryLeader]):
    """One registry: it waits for the lead, leads until it loses the lead, and waits again."""

    def __init__(self, bus: Bus, config: ServiceRegistryConfig | None = None) -> None:
        self.config = config or ServiceRegistryConfig()
        super().__init__(bus, EntityKind.SERVICE_REGISTRY, self.config.lead, self.config.node)

    @property
    def core(self) -> RegistryCore:
        """The records, while it leads."""
        assert self.leader is not None, "it does not lead"
        return self.leader.core

    @property
    def revision(self) -> int:
        """Number of the last written change, while it leads."""
        assert self.leader is not None, "it does not lead"
        return self.leader.advertiser.revision

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Stand by or lead until cancelled. The mesh's streams and buckets are created first."""
        await self._bus.provision(replicas=self.config.replicas)
        await super().run(ready)

    def _make_leader(self, incarnation: str) -> RegistryLeader:
        return RegistryLeader(self._bus, self.config, self._candidate.confirmed, incarnation)
