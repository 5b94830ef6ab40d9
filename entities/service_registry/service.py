"""SRD, service registry and discovery (draft §3): of any number of registries one leads, the others wait.

Registrations are leased records in the bucket `registry`, which is the truth: whoever gets the lead reads it
and goes on. What was answered before is in it. The decisions are in `registry_core.py`; what a leader does,
in `registry_leader.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
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
"""Who gets the lead sooner than this never shows up as waiting."""
LOOK_AGAIN_S = 5.0
"""How long one that meets a newer version's records waits until it looks again."""
PRESENT_AGAIN_S = 1.0
"""Pause before a registration that the leader did not take is tried again."""


class ServiceRegistry:
    """One registry: waits until it has the lead, leads until it has lost it, and again."""

    def __init__(self, bus: Bus, config: ServiceRegistryConfig | None = None) -> None:
        self.config = config or ServiceRegistryConfig()
        self.leader: RegistryLeader | None = None
        self._bus = bus
        self._leaving: set[asyncio.Task[None]] = set()
        self._candidate = LeaderCandidate(bus, self.config.lead, role=ROLE, node=self.config.node)

    @property
    def core(self) -> RegistryCore:
        """The records, while it leads."""
        assert self.leader is not None, "it does not lead"
        return self.leader.core

    @property
    def revision(self) -> int:
        """What was written so far, while it leads."""
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
            await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _stand_by(self, ready: asyncio.Event) -> None:
        """Returns with the lead."""
        winning = asyncio.create_task(self._candidate.won(), name="candidate")
        try:
            await asyncio.wait({winning}, timeout=STANDBY_AFTER_S)
            if not winning.done():
                log.info("standing by")
                ready.set()
                async with self._present():
                    await asyncio.wait({winning})
            winning.result()
        finally:
            winning.cancel()
            await asyncio.gather(winning, return_exceptions=True)

    async def _lead(self, ready: asyncio.Event) -> None:
        """Returns once somebody else leads."""
        term = self._candidate.term
        log.info("leading", term=term)
        # With each term a new incarnation, so that the one before is fenced.
        incarnation = f"{self._bus.sender.incarnation}-t{term}"
        self.leader = RegistryLeader(self._bus, self.config, self._candidate.confirmed, incarnation)
        keeping = asyncio.create_task(self._candidate.keep(), name="lease")
        serving = asyncio.create_task(self.leader.serve(ready.set), name="serve")
        try:
            await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                refusal = _refusal(serving)
                log.error("this registry does not lead", reason=refusal.text)
                ready.set()
                await self._candidate.release()
                await asyncio.sleep(LOOK_AGAIN_S)
                return
            self.leader.drain = False
            log.error("leading no more", term=term, reason=keeping.result())
        finally:
            for task in (serving, keeping):  # what is in flight is answered while the lead is still ours
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            self.leader = None

    @contextlib.asynccontextmanager
    async def _present(self) -> AsyncIterator[None]:
        """Registered with whoever leads, so that people see who stands by."""
        keeping = asyncio.create_task(self._keep_present(), name="presence")
        try:
            yield
        finally:
            keeping.cancel()  # not waited for: it takes leave of a leader, which may be ourselves by then
            self._leaving.add(keeping)
            keeping.add_done_callback(self._leaving.discard)

    async def _keep_present(self) -> None:
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
    """Why it does not serve; any other error is raised."""
    error = serving.exception()
    if isinstance(error, NewerRecord):
        return error
    raise error if error is not None else AssertionError("it serves until it is cancelled")
