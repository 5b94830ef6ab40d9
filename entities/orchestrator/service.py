"""SMO (draft §3): one of any number of orchestrators leads; the others follow.

A follower serves nothing. It watches the registry and listens to registrations, so that its view of the mesh
is complete at the moment at which it gets the lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.tasks import background, cancel
from entities.election.leadership import LeaderCandidate
from entities.metrics import MetricReading
from entities.orchestrator.leader import Leader, OrchestratorConfig
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import NodeStatus
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError
from schemas.job import JobRecord
from schemas.names import standby
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import NodeRegistration

log = get_logger("orchestrator")

STANDBY_AFTER_S = 0.3
"""An orchestrator that gets the lead sooner than this does not register as a standby."""
LOOK_AGAIN_S = 5.0
"""How long an orchestrator that refuses to lead waits before it tries again."""
STANDS_BY = "stands by"
PRESENT_AGAIN_S = 1.0
"""Pause before a registration is tried again that the registry did not accept."""


class Orchestrator:
    """One orchestrator: it follows until it has the lead, leads until it loses it, and follows again."""

    def __init__(self, bus: Bus, config: OrchestratorConfig | None = None) -> None:
        self.config = config or OrchestratorConfig()
        self.mesh = MeshView(bus.pulse.timeout)
        self._bus = bus
        self._candidate = LeaderCandidate(bus, self.config.lease, node=self.config.node)
        self._leader: Leader | None = None
        self._former_records: dict[str, JobRecord] = {}
        self._refusal = ""

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Follows or leads until cancelled; sets `ready` once it does one of the two."""
        ready = ready or asyncio.Event()
        self._bus.pulse.attend()
        watch = await self._bus.bucket(subjects.REGISTRY_RECORD).watch(self.mesh.record)
        try:
            while True:
                if self._refusal:
                    await self._stand_aside(ready)
                lease_task = await self._follow(ready)
                try:
                    await self._lead(lease_task, ready)
                finally:
                    await cancel(lease_task)
        finally:
            await self._candidate.release()
            await watch.stop()

    def readings(self) -> Iterable[MetricReading]:
        """Metrics of the jobs; an orchestrator that does not lead has none."""
        return () if self._leader is None else self._leader.readings()

    async def _follow(self, ready: asyncio.Event) -> asyncio.Task[str]:
        """Waits for the lead; returns the task that renews it and ends once it is lost."""
        async with self._following_registrations():
            lead_task = asyncio.create_task(self._win_lead(), name="candidate")
            try:
                await asyncio.wait({lead_task}, timeout=STANDBY_AFTER_S)
                if not lead_task.done():
                    log.info("standing by")
                    ready.set()
                    async with self._presence(self._standby_record()):
                        await asyncio.wait({lead_task})
                return lead_task.result()
            finally:
                await cancel(lead_task)

    async def _stand_aside(self, ready: asyncio.Event) -> None:
        """Registers as a standby that does not lead: a record of a newer version must not be overwritten."""
        log.error("this orchestrator does not lead", reason=self._refusal)
        ready.set()
        async with self._following_registrations(), self._presence(self._standby_record()):
            await asyncio.sleep(LOOK_AGAIN_S)
        self._refusal = ""

    async def _win_lead(self) -> asyncio.Task[str]:
        await self._candidate.won()
        return asyncio.create_task(self._candidate.keep(), name="lease")

    async def _lead(self, lease_task: asyncio.Task[str], ready: asyncio.Event) -> None:
        """Leads for one term; returns once another orchestrator leads, or this one refuses to."""
        claim = self._candidate.claim
        assert claim is not None
        log.info("leading", term=claim.term)

        async def on_serving() -> None:
            await self._bus.publish(subjects.LEADER, claim)
            log.info("serving", term=claim.term)
            ready.set()

        self._leader = Leader(self._bus, self.mesh, self._candidate, self.config, self._former_records)
        try:
            async with self._presence(self._leader_record(claim.term)):
                reason_lost = await self._leader.run(lease_task, on_serving)
            if (refused := self._leader.refused) is not None:
                self._refusal = refused.text
                await self._candidate.release()
        finally:
            self._former_records = self._leader.records()
            self._leader = None
        log.error("leading no more", term=claim.term, reason=reason_lost)

    @contextlib.asynccontextmanager
    async def _following_registrations(self) -> AsyncIterator[None]:
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

    # --- the registry ----------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _presence(self, record: ServiceRecord) -> AsyncIterator[None]:
        """Keeps `record` registered while the block runs; the block does not wait for the registry."""
        async with background(self._keep_present(record), name=f"presence {record.sid}"):
            yield

    async def _keep_present(self, record: ServiceRecord) -> None:
        while True:
            try:
                async with RegistrationClient(self._bus, record) as presence:
                    await presence.fenced.wait()
                log.warning("the registry knows another one in our place", sid=record.sid)
                return
            except DmscError as error:
                log.warning("not registered", sid=record.sid, reason=error.text)
            await asyncio.sleep(PRESENT_AGAIN_S)

    def _leader_record(self, term: int) -> ServiceRecord:
        """The record under the SID of the role; a new incarnation in each term fences the former leader."""
        incarnation = f"{self._bus.sender.incarnation}-t{term}"
        return self._record(self.config.sid, incarnation, InstanceState.ACTIVE, f"leads in term {term}")

    def _standby_record(self) -> ServiceRecord:
        incarnation = self._bus.sender.incarnation
        return self._record(
            standby(self._bus.sender.name, incarnation),
            incarnation,
            InstanceState.PENDING,
            self._standby_reason(),
        )

    def _standby_reason(self) -> str:
        refusal = self._refusal or self._candidate.refusal
        return f"does not lead: {refusal}" if refusal else STANDS_BY

    def _record(self, sid: str, incarnation: str, state: InstanceState, reason: str) -> ServiceRecord:
        return ServiceRecord(
            sid=sid,
            prefix="entity/orchestrator",
            kind=EntityKind.ORCHESTRATOR,
            incarnation=incarnation,
            state=state,
            endpoint=Endpoint(cluster="mesh", node=self.config.node, pid=os.getpid()),
            reason=reason,
        )
