"""SMO (draft §3): of any number of orchestrators one leads; the others wait, the mesh before their eyes.

A follower serves nothing. It follows the registry and overhears who registers, so that it need not wait
for anybody when its turn comes.
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
"""Who gets the lead sooner than this never shows up as waiting."""
LOOK_AGAIN_S = 5.0
"""How long one that refuses to lead waits until it looks again."""
STANDS_BY = "stands by"
PRESENT_AGAIN_S = 1.0
"""Pause before a registration that the registry did not take is tried again."""


class Orchestrator:
    """One orchestrator: `_follow` until it has the lead, `_lead` until it has lost it, and again."""

    def __init__(self, bus: Bus, config: OrchestratorConfig | None = None) -> None:
        self.config = config or OrchestratorConfig()
        self.mesh = MeshView(bus.pulse.timeout)
        self._bus = bus
        self._candidate = LeaderCandidate(bus, self.config.lease, node=self.config.node)
        self._leader: Leader | None = None
        self._known: dict[str, JobRecord] = {}
        self._refusal = ""

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Follows or leads until cancelled; `ready` is set as soon as it does either."""
        ready = ready or asyncio.Event()
        self._bus.pulse.attend()
        watch = await self._bus.bucket(subjects.REGISTRY_RECORD).watch(self.mesh.record)
        try:
            while True:
                if self._refusal:
                    await self._stand_aside(ready)
                keeping = await self._follow(ready)
                try:
                    await self._lead(keeping, ready)
                finally:
                    keeping.cancel()
                    await asyncio.gather(keeping, return_exceptions=True)
        finally:
            await self._candidate.release()
            await watch.stop()

    def readings(self) -> Iterable[MetricReading]:
        """For whoever scrapes this process; who waits for the lead has nothing to tell of jobs."""
        return () if self._leader is None else self._leader.readings()

    async def _follow(self, ready: asyncio.Event) -> asyncio.Task[str]:
        """Returns with the lead, and with what keeps it from the first moment on."""
        async with self._overhearing():
            winning = asyncio.create_task(self._win(), name="candidate")
            try:
                await asyncio.wait({winning}, timeout=STANDBY_AFTER_S)
                if not winning.done():
                    log.info("standing by")
                    ready.set()
                    async with self._presence(self._standby_record()):
                        await asyncio.wait({winning})
                return winning.result()
            finally:
                winning.cancel()
                await asyncio.gather(winning, return_exceptions=True)

    async def _stand_aside(self, ready: asyncio.Event) -> None:
        """A record of a newer version is not ours to overwrite: it says so where that is seen."""
        log.error("this orchestrator does not lead", reason=self._refusal)
        ready.set()
        async with self._overhearing(), self._presence(self._standby_record()):
            await asyncio.sleep(LOOK_AGAIN_S)
        self._refusal = ""

    async def _win(self) -> asyncio.Task[str]:
        await self._candidate.won()
        return asyncio.create_task(self._candidate.keep(), name="lease")

    async def _lead(self, keeping: asyncio.Task[str], ready: asyncio.Event) -> None:
        """Returns once somebody else leads."""
        claim = self._candidate.claim
        assert claim is not None
        log.info("leading", term=claim.term)

        async def began() -> None:
            await self._bus.publish(subjects.LEADER, claim)
            log.info("serving", term=claim.term)
            ready.set()

        self._leader = Leader(self._bus, self.mesh, self._candidate, self.config, self._known)
        try:
            async with self._presence(self._leader_record(claim.term)):
                lost = await self._leader.run(keeping, began)
            if (refused := self._leader.refused) is not None:
                self._refusal = refused.text
                await self._candidate.release()
        finally:
            self._known = self._leader.records()
            self._leader = None
        log.error("leading no more", term=claim.term, reason=lost)

    @contextlib.asynccontextmanager
    async def _overhearing(self) -> AsyncIterator[None]:
        """What gateways, routers and agents tell the leader is heard here as well; nothing is answered."""

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
        """Registered beside the work in the block, which waits for no registry."""
        present = asyncio.create_task(self._keep_present(record), name=f"presence {record.sid}")
        try:
            yield
        finally:
            present.cancel()
            await asyncio.gather(present, return_exceptions=True)

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
        """Under the name of the role; with each term a new incarnation, so that the one before is fenced."""
        incarnation = f"{self._bus.sender.incarnation}-t{term}"
        return self._record(self.config.sid, incarnation, InstanceState.ACTIVE, f"leads in term {term}")

    def _standby_record(self) -> ServiceRecord:
        incarnation = self._bus.sender.incarnation
        return self._record(
            standby(self._bus.sender.name, incarnation), incarnation, InstanceState.PENDING, self._why_not()
        )

    def _why_not(self) -> str:
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
