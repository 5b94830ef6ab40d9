"""SRD, service registry and discovery (draft §3, §4.3 Types 1 and 2, §4.4(1) and (6)).

Registrations are leased records in the bucket `registry`, which is the truth: a restart reloads it.
Each change is written first, then advertised (Type 2) within about 20 ms, together with its
neighbours in time; the full state follows every 10 s. The decisions are in `registry_core.py`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.services import Subscription
from entities.registry_core import LeaseConfig, RegistryCore
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadMessage, DmscError
from schemas.registry import (
    Endpoint,
    Heartbeat,
    InstanceState,
    ReleaseJob,
    Resolve,
    Resolved,
    ServiceRecord,
    StateChange,
)
from schemas.signals import Registration, RegistrationLease, RouteAdvertisement, TerminationReport

log = get_logger("service-registry")


@dataclass(frozen=True, kw_only=True)
class ServiceRegistryConfig:
    """Settings of the registry."""

    lease: LeaseConfig = field(default_factory=LeaseConfig)
    coalesce_s: float = 0.02  # changes this close share one Type 2; longer saves messages, delays routes
    full_every_s: float = 10.0  # the periodic full state of draft §4.3; heals whoever missed a delta
    chunk_records: int = 256  # records per advertisement (about 0.7 kB each), far below the server's 1 MB
    write_retry_s: float = 0.2  # pause before a write that the bucket did not take is repeated
    replicas: int = 1  # of streams and buckets: 1 on an embedded server, 3 on a cluster
    remembered_terminations: int = 1024  # jobs whose termination reports are kept for the release's answer

    def __post_init__(self) -> None:
        if not self.coalesce_s < self.full_every_s:
            raise ValueError(f"coalesce_s {self.coalesce_s} must be below full_every_s {self.full_every_s}")


class ServiceRegistry:
    """The registry's service: one per mesh."""

    def __init__(self, bus: Bus, config: ServiceRegistryConfig | None = None) -> None:
        self.config = config or ServiceRegistryConfig()
        self.core = RegistryCore(self.config.lease)
        self.revision = 0
        self._bus = bus
        self._bucket = bus.bucket(subjects.REGISTRY_RECORD)
        self._advertised = 0
        self._pending: set[str] = set()
        self._news = asyncio.Event()
        self._full_due = asyncio.Event()
        self._writing: dict[str, asyncio.Lock] = {}
        self._terminated: dict[str, set[str]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled. The mesh's streams and buckets are created first."""
        await self._bus.provision(replicas=self.config.replicas)
        await self._reload()
        self._bus.on_reconnect(self._reconnected)
        subscriptions: list[Subscription] = []
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                subscriptions += [
                    await self._bus.serve(subjects.REGISTRATION, self._register),
                    await self._bus.serve(subjects.STATE_CHANGE, self._change),
                    await self._bus.serve(subjects.RESOLVE, self._resolve),
                    await self._bus.serve(subjects.RELEASE_JOB, self._release),
                    await self._bus.subscribe(subjects.HEARTBEAT, self._heartbeat),
                    await self._bus.subscribe(subjects.TERMINATION, self._termination),
                ]
                tasks.create_task(self._advertise(), name="advertise")
                tasks.create_task(self._advertise_full(), name="advertise-full")
                self._full_due.set()
                log.info("registry ready", records=len(self.core), revision=self.revision)
                if ready is not None:
                    ready.set()
                await self._watch_silence()
            finally:
                for subscription in subscriptions:
                    await subscription.stop()

    # --- Type 1 and discovery ------------------------------------------------------------------------
    async def _register(self, message: Registration, envelope: Envelope) -> RegistrationLease:
        record = message.record
        if record.sid == self._bus.sender.name:
            raise BadMessage(f"sid {record.sid} is the registry's own; choose another", sid=record.sid)
        touched = self.core.register(record, time.monotonic())
        await self._store(touched)
        held = self.core.record(record.sid)
        if touched:
            log.info("registered", sid=record.sid, state=record.state, incarnation=record.incarnation)
        return RegistrationLease(
            sid=record.sid,
            route_id=held.route_id if held else 0,
            heartbeat_s=self.config.lease.heartbeat_s,
            expiry_s=self.config.lease.expiry_s,
            revision=self.revision,
        )

    async def _heartbeat(self, message: Heartbeat, envelope: Envelope) -> None:
        self._store_soon(self.core.heartbeat(message, time.monotonic()))

    async def _change(self, message: StateChange, envelope: Envelope) -> Ack:
        touched = self.core.change(message, time.monotonic())
        await self._store(touched)
        if touched:
            log.info("state changed", sid=message.sid, state=message.state, reason=message.reason)
        return Ack()

    async def _resolve(self, message: Resolve, envelope: Envelope) -> Resolved:
        return Resolved(revision=self.revision, records=self.core.resolve(message))

    async def _release(self, message: ReleaseJob, envelope: Envelope) -> Ack:
        touched = self.core.release(message.job)
        await self._store(touched)
        reporters = sorted(self._terminated.pop(message.job, set()))
        note = f"released {len(touched)} records; communication ended at {', '.join(reporters) or 'nobody'}"
        log.info("job released", job=message.job, records=len(touched), ended_at=reporters)
        return Ack(note=note)

    async def _termination(self, message: TerminationReport, envelope: Envelope) -> None:
        self._terminated.setdefault(message.job, set()).add(message.sid)
        while len(self._terminated) > self.config.remembered_terminations:
            self._terminated.pop(next(iter(self._terminated)))
        log.info("communication ended", job=message.job, at=message.sid, microbatches=message.microbatches)

    # --- the bucket is the truth ---------------------------------------------------------------------
    async def _reload(self) -> None:
        """Read the bucket, then write our own record, whose revision is above all earlier ones."""
        own = self._bus.sender
        loaded = []
        for entry in await self._bucket.entries():
            if isinstance(entry.message, ServiceRecord):
                loaded.append(entry.message)
        me = ServiceRecord(
            sid=own.name,
            prefix="entity/service-registry",
            kind=EntityKind.SERVICE_REGISTRY,
            incarnation=own.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="mesh", node="mesh"),
        )
        moved = self.core.load(loaded, time.monotonic()) | self.core.register(me, time.monotonic())
        self.revision = self._advertised = await self._bucket.put(self.core.record(me.sid) or me, sid=me.sid)
        await self._store(moved)

    async def _store(self, sids: frozenset[str]) -> None:
        """Write what changed, then let it be advertised. Returns once the bucket has it."""
        if len(sids) == 1:
            await self._store_one(next(iter(sids)))
        elif sids:
            await asyncio.gather(*(self._store_one(sid) for sid in sorted(sids)))

    def _store_soon(self, sids: frozenset[str]) -> None:
        if sids and self._tasks is not None:
            self._tasks.create_task(self._store(sids))

    async def _store_one(self, sid: str) -> None:
        lock = self._writing.setdefault(sid, asyncio.Lock())
        async with lock:
            while True:
                record = self.core.record(sid)  # the newest, also where this write waited for an older one
                try:
                    if record is None:
                        await self._bucket.delete(sid=sid)
                    else:
                        await self._bucket.put(record, sid=sid)
                    break
                except DmscError as error:
                    log.warning("registry record not written yet", sid=sid, code=error.code, error=error.text)
                    await asyncio.sleep(self.config.write_retry_s)
        if record is None and not lock.locked():
            self._writing.pop(sid, None)
        self.revision += 1
        self._pending.add(sid)
        self._news.set()

    # --- Type 2 ------------------------------------------------------------------------------------------
    async def _advertise(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(self.config.coalesce_s)
            await self._flush()

    async def _flush(self) -> None:
        self._news.clear()
        sids, self._pending = sorted(self._pending), set()
        previous, self._advertised = self._advertised, self.revision
        if sids:
            await self._publish_delta(previous, sids)

    async def _publish_delta(self, previous: int, sids: list[str]) -> None:
        revision = self._advertised
        size = self.config.chunk_records
        for start in range(0, len(sids), size):
            chunk = sids[start : start + size]
            found = [(sid, self.core.record(sid)) for sid in chunk]
            await self._publish(
                RouteAdvertisement(
                    revision=revision,
                    previous=previous,
                    changed=tuple(record for _, record in found if record is not None),
                    removed=tuple(sid for sid, record in found if record is None),
                )
            )
            previous = revision  # further chunks of the same revision build on the first

    async def _advertise_full(self) -> None:
        """At start, on a reconnect, and periodically."""
        while True:
            try:
                async with asyncio.timeout(self.config.full_every_s):
                    await self._full_due.wait()
            except TimeoutError:
                pass
            self._full_due.clear()
            await self._flush()
            records = self.core.records()
            if len(records) > self.config.chunk_records:
                # In pieces that add and never remove: a receiver at another revision asks for a snapshot.
                await self._publish_delta(self._advertised, [record.sid for record in records])
                continue
            await self._publish(
                RouteAdvertisement(
                    revision=self._advertised, previous=self._advertised, full=True, changed=records
                )
            )

    async def _publish(self, message: RouteAdvertisement) -> None:
        try:
            await self._bus.publish(subjects.ADVERTISEMENT, message)
        except DmscError as error:
            # Receivers see the gap in the next revision, and the reconnect sends the full state.
            log.warning("advertisement not sent", revision=message.revision, error=error.text)

    # --- time -----------------------------------------------------------------------------------------
    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease.tick_s)
            if not self._bus.connected:
                continue  # we hear nobody: silence means nothing
            own = self._bus.sender
            self.core.heartbeat(
                Heartbeat(sid=own.name, incarnation=own.incarnation, state=InstanceState.ACTIVE),
                time.monotonic(),
            )
            touched = self.core.tick(time.monotonic())
            if touched:
                log.warning("leases expired", sids=sorted(touched))
                self._store_soon(touched)

    async def _reconnected(self) -> None:
        """Nobody could be heard while we were cut off: everyone gets a lease again, and the full state."""
        self.core.forgive(self.config.lease.expiry_s, time.monotonic())
        self._full_due.set()
