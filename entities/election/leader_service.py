"""A service of which one replica leads while the others stand by: the orchestrator, the service registry.

A replica waits for the lead, leads for one term, and waits again once the lead is lost. While it waits for
long it is registered as a standby, so that users see which replicas there are. A replica that meets records
of a newer version refuses to lead: it gives up the lead, says why in its registration, and tries again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import TaskSet, background
from entities.election.leadership import LeaderCandidate
from entities.election.lease import LeadershipLeaseConfig
from entities.presence.entity_record import entity_record, stay_registered
from schemas.envelope import EntityKind
from schemas.errors import NewerRecord
from schemas.names import standby
from schemas.registry import InstanceState, ServiceRecord


@dataclass(frozen=True, kw_only=True)
class LeaderServiceTimes:
    """Timing of a replica that does not lead."""

    standby_after_s: float = 0.3  # a replica that gets the lead sooner does not register as a standby
    refusal_s: float = 5.0  # how long a replica that refuses to lead waits before it tries again
    register_again_s: float = 1.0  # pause before a registration is tried again that was not accepted


class TermLeader(Protocol):
    """The work of a leader in one term."""

    refused: NewerRecord | None
    """The record of a newer version because of which it refuses to lead."""

    async def run(self, keeping: asyncio.Task[str], began: Callable[[], Awaitable[None]]) -> str:
        """Leads until `keeping` ends or it refuses to lead; returns why. Awaits `began` once it serves."""


LeaderT = TypeVar("LeaderT", bound=TermLeader)


class LeaderService(ABC, Generic[LeaderT]):
    """One replica of a role. `leader` is its work of this term, None while it does not lead."""

    def __init__(
        self,
        bus: Bus,
        kind: EntityKind,
        lease: LeadershipLeaseConfig,
        node: str,
        times: LeaderServiceTimes = LeaderServiceTimes(),
    ) -> None:
        self.leader: LeaderT | None = None
        self._bus = bus
        self._kind = kind
        self._node = node
        self._times = times
        self._log = get_logger(kind.value)
        self._candidate = LeaderCandidate(bus, lease, role=kind.value, node=node)
        self._refusal = ""
        self._registrations = TaskSet()

    @abstractmethod
    def _make_leader(self, incarnation: str) -> LeaderT:
        """The work of the term that begins; its incarnation fences the leader of the term before."""

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        """The work of a replica that does not lead."""
        yield

    @contextlib.asynccontextmanager
    async def _leading(self, leader: LeaderT, incarnation: str, term: int) -> AsyncIterator[None]:
        """The work beside `leader` during one term."""
        yield

    async def _on_serving(self) -> None:
        """Called when the leader has begun to serve."""

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Stands by or leads until cancelled; sets `ready` once it does one of the two."""
        ready = ready or asyncio.Event()
        try:
            while True:
                if self._refusal:
                    await self._stand_aside(ready)
                await self._stand_by(ready)
                await self._lead(ready)
        finally:
            await self._candidate.release()
            await self._registrations.wait()

    async def _stand_by(self, ready: asyncio.Event) -> None:
        """Waits for the lead."""
        async with self._following(), background(self._candidate.win(), name="candidate") as election:
            await asyncio.wait({election}, timeout=self._times.standby_after_s)
            if not election.done():
                self._log.info("standing by")
                ready.set()
                async with self._standby_registration():
                    await asyncio.wait({election})
            election.result()

    async def _stand_aside(self, ready: asyncio.Event) -> None:
        """Stays out of the election for a while: a record of a newer version must not be overwritten."""
        self._log.error("this replica does not lead", reason=self._refusal)
        ready.set()
        async with self._following(), self._standby_registration():
            await asyncio.sleep(self._times.refusal_s)
        self._refusal = ""

    async def _lead(self, ready: asyncio.Event) -> None:
        """Leads for one term; returns once another replica leads, or this one refuses to."""
        claim = self._candidate.claim
        assert claim is not None
        self._log.info("leading", term=claim.term)
        incarnation = f"{self._bus.sender.incarnation}-t{claim.term}"
        self.leader = leader = self._make_leader(incarnation)

        async def began() -> None:
            await self._on_serving()
            ready.set()

        try:  # the lease is kept until requests in flight have been answered
            async with (
                background(self._candidate.keep(), name="lease") as keeping,
                self._leading(leader, incarnation, claim.term),
            ):
                reason = await leader.run(keeping, began)
        finally:
            self.leader = None
        if leader.refused is None:
            self._log.error("leading no more", term=claim.term, reason=reason)
            return
        self._refusal = leader.refused.text  # which `_stand_aside` logs
        await self._candidate.release()

    # --- the registry ----------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _registration(self, record: ServiceRecord) -> AsyncIterator[None]:
        """Keeps `record` registered while the block runs; neither its start nor its end waits for that."""
        work = stay_registered(self._bus, record, self._log.warning, retry_s=self._times.register_again_s)
        registration = self._registrations.create(work, name=f"presence {record.sid}")
        try:
            yield
        finally:
            registration.cancel()  # not awaited: it deregisters with a registry, which may be this process

    def _standby_registration(self) -> contextlib.AbstractAsyncContextManager[None]:
        incarnation = self._bus.sender.incarnation
        sid = standby(self._bus.sender.name, incarnation)
        refusal = self._refusal or self._candidate.refusal
        reason = f"does not lead: {refusal}" if refusal else "stands by"
        return self._registration(self._record(sid, incarnation, InstanceState.PENDING, reason))

    def _record(self, sid: str, incarnation: str, state: InstanceState, reason: str) -> ServiceRecord:
        return entity_record(
            self._kind, sid, incarnation, node=self._node, state=state, reason=reason, pid=os.getpid()
        )
