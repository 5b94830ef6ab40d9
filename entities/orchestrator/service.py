"""SMO (draft §3): one of any number of orchestrators leads; the others follow.

A follower serves nothing. It watches the registry and listens to registrations, so that its view of the mesh
is complete at the moment at which it gets the lead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from bus import subjects
from bus.connection import Bus
from entities.election.leader_service import LeaderService
from entities.metrics import MetricReading
from entities.orchestrator.leader import Leader, OrchestratorConfig
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import NodeStatus
from schemas.envelope import EntityKind, Envelope
from schemas.job import JobRecord
from schemas.registry import InstanceState
from schemas.signals import NodeRegistration


class Orchestrator(LeaderService[Leader]):
    """One orchestrator: it follows until it has the lead, leads until it loses it, and follows again."""

    def __init__(self, bus: Bus, config: OrchestratorConfig | None = None) -> None:
        self.config = config or OrchestratorConfig()
        super().__init__(bus, EntityKind.ORCHESTRATOR, self.config.lease, self.config.node)
        self.mesh = MeshView(bus.pulse.timeout)
        self.mesh.topology = self.config.network
        self._former_records: dict[str, JobRecord] = {}

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Follows or leads until cancelled; sets `ready` once it does one of the two."""
        self._bus.pulse.attend()
        watch = await self._bus.bucket(subjects.REGISTRY_RECORD).watch(self.mesh.record)
        try:
            await super().run(ready)
        finally:
            await watch.stop()

    def readings(self) -> Iterable[MetricReading]:
        """Metrics of the jobs; an orchestrator that does not lead has none."""
        return () if self.leader is None else self.leader.readings()

    def _make_leader(self, incarnation: str) -> Leader:
        return Leader(self._bus, self.mesh, self._candidate, self.config, self._former_records)

    @contextlib.asynccontextmanager
    async def _leading(self, leader: Leader, incarnation: str, term: int) -> AsyncIterator[None]:
        """Stays registered under the SID of the role."""
        state, reason = InstanceState.ACTIVE, f"leads in term {term}"
        try:
            async with self._registration(self._record(self.config.sid, incarnation, state, reason)):
                yield
        finally:
            self._former_records = leader.records()

    async def _on_serving(self) -> None:
        claim = self._candidate.claim
        if claim is not None:
            await self._bus.publish(subjects.LEADER, claim)
            self._log.info("serving", term=claim.term)

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        """Follows the registrations that gateways, routers and agents send to the leader; answers none."""

        async def service(message: NodeRegistration, envelope: Envelope) -> None:
            await self.mesh.service(message)

        async def node(message: NodeStatus, envelope: Envelope) -> None:
            await self.mesh.node(message)

        subscriptions = [
            await self._bus.subscribe(subjects.MESH_REGISTRATION, service),
            await self._bus.subscribe(subjects.NODE_STATUS, node),
        ]
        try:
            yield
        finally:
            for subscription in subscriptions:
                await subscription.stop(drain=False)
