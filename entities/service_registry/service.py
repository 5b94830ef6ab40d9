"""SRD, service registry and discovery (draft §3): one registry leads, any number of others stand by.

Registrations are leased records in the bucket `registry`, which is the source of truth: a new leader reads it
and goes on. Each answered change is in it. The decisions are in `core.py`; the work of a leader is in
`leader.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.tasks import TaskSet, cancel
from entities.election.leadership import LeaderCandidate
from entities.service_registry.core import RegistryCore
from entities.service_registry.leader import RegistryLeader, ServiceRegistryConfig
from schemas.envelope import EntityKind
from schemas.errors import DmscError, NewerRecord
from schemas.names import standby
from schemas.registry import Endpoint, InstanceState, ServiceRecord

__all__ = ["ServiceRegistry", "ServiceRegistryConfig"]

log = get_logger("service-registry")

ROLE = "service-registry"
STANDBY_AFTER_S = 0.3
"""A registry that gets the lead sooner than this never registers as a standby."""
LOOK_AGAIN_S = 5.0
"""Pause of a registry that met records of a newer version, before it stands for the lead again."""
PRESENT_AGAIN_S = 1.0
"""Pause before a registration that the leader refused is tried again."""


class ServiceRegistry:
    """One registry: it waits for the lead, leads until it loses the lead, and waits again."""

    def __init__(self, bus: Bus, config: ServiceRegistryConfig | None = None) -> None:
        self.config = config or ServiceRegistryConfig()
        self.leader: RegistryLeader | None = None
        self._bus = bus
        self._deregistrations = TaskSet()
        self._candidate = LeaderCandidate(bus, self.config.lead, role=ROLE, node=self.config.node)

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
        ready = ready or asyncio.Event()
        await self._bus.provision(replicas=self.config.replicas)
        try:
            while True:
                await self._stand_by(ready)
                await self._lead(ready)
        finally:
            await self._candidate.release()
            await self._deregistrations.wait()

    async def _stand_by(self, ready: asyncio.Event) -> None:
        """Wait for the lead, registered as a standby."""
        election = asyncio.create_task(self._candidate.won(), name="candidate")
        try:
            await asyncio.wait({election}, timeout=STANDBY_AFTER_S)
            if not election.done():
                log.info("standing by")
                ready.set()
                async with self._standby_registration():
                    await asyncio.wait({election})
            election.result()
        finally:
            await cancel(election)

    async def _lead(self, ready: asyncio.Event) -> None:
        """Lead until another registry does."""
        term = self._candidate.term
        log.info("leading", term=term)
        # Each term has a new incarnation, so that the one before is fenced.
        incarnation = f"{self._bus.sender.incarnation}-t{term}"
        self.leader = RegistryLeader(self._bus, self.config, self._candidate.confirmed, incarnation)
        renewal = asyncio.create_task(self._candidate.keep(), name="lease")
        serving = asyncio.create_task(self.leader.serve(ready.set), name="serve")
        try:
            await asyncio.wait({renewal, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                refusal = _refusal(serving)
                log.error("this registry does not lead", reason=refusal.text)
                ready.set()
                await self._candidate.release()
                await asyncio.sleep(LOOK_AGAIN_S)
                return
            self.leader.drain = False
            log.error("leading no more", term=term, reason=renewal.result())
        finally:
            for task in (serving, renewal):  # requests in flight are answered while the lead is still ours
                await cancel(task)
            self.leader = None

    @contextlib.asynccontextmanager
    async def _standby_registration(self) -> AsyncIterator[None]:
        """Stay registered with the leader, so that users see which registries stand by."""
        registration = asyncio.create_task(self._keep_registered(), name="presence")
        try:
            yield
        finally:
            registration.cancel()  # not awaited: it deregisters with a leader, which may be this process
            self._deregistrations.add(registration)

    async def _keep_registered(self) -> None:
        incarnation = self._bus.sender.incarnation
        record = ServiceRecord(
            sid=standby(self._bus.sender.name, incarnation),
            prefix="entity/service-registry",
            kind=EntityKind.SERVICE_REGISTRY,
            incarnation=incarnation,
            state=InstanceState.PENDING,
            endpoint=Endpoint(cluster="mesh", node=self.config.node, pid=os.getpid()),
            reason="stands by",
        )
        while True:
            try:
                async with RegistrationClient(self._bus, record) as presence:
                    await presence.fenced.wait()
                log.warning("the leader knows another one in our place", sid=record.sid)
                return
            except DmscError as error:
                log.debug("not registered", sid=record.sid, reason=error.text)
            await asyncio.sleep(PRESENT_AGAIN_S)


def _refusal(serving: asyncio.Task[None]) -> NewerRecord:
    """Why `serving` refused to lead; any other error is raised."""
    error = serving.exception()
    if isinstance(error, NewerRecord):
        return error
    raise error if error is not None else AssertionError("it serves until it is cancelled")
