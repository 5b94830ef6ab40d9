"""The registry that leads: it alone answers, writes and advertises (draft §4.3 Types 1 and 2, §4.4(1), (6)).

Each change is in the bucket before it is answered and advertised. Every answer waits until the lead is
surely ours, so that one that was frozen tells nothing that another one knows better.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.disconnects import connection_name, subscribe_disconnects
from bus.messaging.handlers import Subscription
from bus.nats.durable_subscription import DurableSubscription
from bus.wire.packed import Packed, assemble
from entities.election.lease import LeadershipLeaseConfig
from entities.service_registry.advertiser import AdvertiseConfig, RegistryAdvertiser
from entities.service_registry.core import RegistrationLeaseConfig, RegistryCore
from entities.service_registry.record_authority import refuse_foreign, refuse_others_state, refuse_strange
from entities.service_registry.writer import RegistryWriter
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import Ack, BadMessage, DmscError, Refused
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
from schemas.signals import Registration, RegistrationLease, TerminationReport
from schemas.telemetry import DeadLetter

log = get_logger("service-registry")

FEW = 64
"""Up to so many changes of one lot are told one by one in the log."""
TOGETHER = 256
"""Registrations that are decided in one go: some ten milliseconds, in which nothing else runs."""
SHOWN = 8
"""So many SIDs stand in one line of the log."""


@dataclass(frozen=True, kw_only=True)
class ServiceRegistryConfig:
    """Settings of the registry."""

    lease: RegistrationLeaseConfig = field(default_factory=RegistrationLeaseConfig)
    advertise: AdvertiseConfig = field(default_factory=AdvertiseConfig)
    lead: LeadershipLeaseConfig = field(default_factory=LeadershipLeaseConfig)
    node: str = "mesh"
    page_records: int = 1024  # records per answer: what a reader decodes in one go
    page_bytes: int = 512 << 10  # and their size, below any server's largest message
    registering: int = 2048  # registrations in work at a time; each waits for the bucket, so they go together
    lot: int = 1000  # records written in one go: what the server takes as one batch
    write_retry_s: float = 0.2  # pause before a write that the bucket did not take is repeated
    replicas: int = 1  # of streams and buckets: 1 on an embedded server, 3 on a cluster
    remembered_terminations: int = 1024  # jobs whose termination reports are kept for the release's answer


class RegistryLeader:
    """One term of a registry. `serve` ends by cancellation only."""

    def __init__(
        self,
        bus: Bus,
        config: ServiceRegistryConfig,
        confirmed: Callable[[], Awaitable[None]],
        incarnation: str,
    ) -> None:
        self.config = config
        self.core = RegistryCore(config.lease)
        self._bus = bus
        self._confirmed = confirmed
        self._incarnation = incarnation
        self._holder = connection_name(bus.sender)
        self._now = bus.pulse.now
        self._crowded = False
        self.drain = True
        """Whether what was asked is still answered at the end: not once somebody else leads."""
        self._terminated: dict[str, set[str]] = {}
        self._writer = RegistryWriter(
            bus.bucket(subjects.REGISTRY_RECORD),
            self.core.packed,
            confirmed,
            self._written,
            lot=config.lot,
            retry_s=config.write_retry_s,
        )
        self.advertiser = RegistryAdvertiser(bus, self.core, config.advertise, confirmed, 0)

    async def serve(self, began: Callable[[], None]) -> None:
        """Take over what the bucket holds, then serve until cancelled; `began` is called in between."""
        self._bus.pulse.attend()
        with self._bus.pulse.held():  # leases run in it: a server that stands still silences everybody
            await self._serve(began)

    async def _serve(self, began: Callable[[], None]) -> None:
        moved = await self._reload()
        forget = self._bus.on_reconnect(self._reconnected)
        subscriptions: list[Subscription] = []
        feed = await self._listen_for_departures()
        bus, many = self._bus, self.config.registering
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writer.run(), name="write")
                subscriptions += [
                    await bus.serve_lots(
                        subjects.REGISTRATION, self._register, most=TOGETHER, concurrency=many // TOGETHER
                    ),
                    await bus.serve(subjects.INSTANCE_RECORD, self._register_failed),
                    await bus.serve(subjects.STATE_CHANGE, self._change, concurrency=many),
                    await bus.serve(subjects.INSTANCE_STATE, self._change_instance, concurrency=many),
                    await bus.serve(subjects.RESOLVE, self._resolve),
                    await bus.serve(subjects.RELEASE_JOB, self._release),
                    await bus.subscribe(subjects.HEARTBEAT, self._heartbeat),
                    await bus.subscribe(subjects.TERMINATION, self._termination),
                    await bus.subscribe(subjects.DEAD_LETTER, self._unreadable),
                ]
                self._writer.soon(moved)
                tasks.create_task(self.advertiser.deltas(), name="advertise")
                tasks.create_task(self.advertiser.full(), name="advertise-full")
                log.info("registry ready", records=len(self.core), revision=self.advertiser.revision)
                began()
                try:
                    await self._watch_silence()
                finally:
                    stops = [subscription.stop(drain=self.drain) for subscription in subscriptions]
                    await asyncio.gather(*stops, return_exceptions=True)
        finally:
            forget()
            if feed is not None:
                await self._bus.link.unsubscribe(feed)

    # --- Type 1 and discovery ------------------------------------------------------------------------
    async def _register(
        self, asked: Sequence[tuple[Registration, Envelope]]
    ) -> list[RegistrationLease | DmscError]:
        """Many in a storm: they are decided one by one, written and answered together."""
        return await self._admit_all(asked, self._admit)

    async def _register_failed(self, message: Registration, envelope: Envelope) -> RegistrationLease:
        """A node agent registers an instance that failed before it could do so itself."""
        (answer,) = await self._admit_all([(message, envelope)], self._admit_failed)
        if isinstance(answer, DmscError):
            raise answer
        return answer

    async def _admit_all(
        self,
        asked: Sequence[tuple[Registration, Envelope]],
        admit: Callable[[ServiceRecord, Sender, float], frozenset[str]],
    ) -> list[RegistrationLease | DmscError]:
        await self._confirmed()
        now = self._now()
        touched: set[str] = set()
        refused: dict[int, DmscError] = {}
        for number, (message, envelope) in enumerate(asked):
            try:
                touched |= admit(message.record, envelope.sender, now)
            except DmscError as error:
                refused[number] = error
        held = {message.record.sid for number, (message, _) in enumerate(asked) if number not in refused}
        unwritten = await self._writer.write_each(touched)
        await self._writer.settled(held - touched)
        if touched and not self._crowded:
            for record in (message.record for message, _ in asked if message.record.sid in touched):
                log.info("registered", sid=record.sid, state=record.state, incarnation=record.incarnation)
        return [
            refused.get(number) or unwritten.get(message.record.sid) or self._lease(message.record.sid)
            for number, (message, _) in enumerate(asked)
        ]

    def _admit(self, record: ServiceRecord, speaker: Sender, now: float) -> frozenset[str]:
        if record.sid == self._bus.sender.name:
            raise BadMessage(f"sid {record.sid} is the registry's own; choose another", sid=record.sid)
        if self._bus.link.guarded:  # else nobody is known by name
            refuse_strange(record, speaker)
        return self.core.register(record, now, connection_name(speaker))

    def _admit_failed(self, record: ServiceRecord, speaker: Sender, now: float) -> frozenset[str]:
        if self._bus.link.guarded:
            refuse_foreign(record, speaker.name, self.core.record(record.sid))
        return self.core.register(record, now, connection_name(speaker))

    def _lease(self, sid: str) -> RegistrationLease:
        return RegistrationLease(
            sid=sid,
            route_id=self.core.route_id(sid),
            heartbeat_s=self.config.lease.heartbeat_s,
            expiry_s=self.config.lease.expiry_s,
            revision=self.advertiser.revision,
        )

    async def _heartbeat(self, message: Heartbeat, envelope: Envelope) -> None:
        touched = self.core.heartbeat(message, self._now(), connection_name(envelope.sender))
        if touched:
            self._writer.soon(touched)

    async def _change(self, message: StateChange, envelope: Envelope) -> Ack:
        await self._confirmed()
        return await self._move(message)

    async def _change_instance(self, message: StateChange, envelope: Envelope) -> Ack:
        """A node agent tells of an instance of its own."""
        await self._confirmed()
        if self._bus.link.guarded:
            refuse_others_state(message.sid, envelope.sender.name, self.core.record(message.sid))
        return await self._move(message)

    async def _move(self, message: StateChange) -> Ack:
        touched = self.core.change(message, self._now())
        await self._writer.write(touched)
        if touched and not self._crowded:
            log.info("state changed", sid=message.sid, state=message.state, reason=message.reason)
        return Ack()

    async def _resolve(self, message: Resolve, envelope: Envelope) -> Packed[Resolved]:
        await self._confirmed()
        await self.advertiser.flush()  # else the next delta would not build on this answer's revision
        page, after = self.core.page(message, self.config.page_bytes, self.config.page_records)
        told = {"revision": self.advertiser.advertised, "next_after": after}
        return assemble(Resolved, told, {"records": page})

    async def _release(self, message: ReleaseJob, envelope: Envelope) -> Ack:
        await self._confirmed()
        touched = self.core.release(message.job)
        await self._writer.write(touched)
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
    async def _reload(self) -> frozenset[str]:
        """Read the bucket, then write our own record, whose revision is above all earlier ones.

        Returns the SIDs whose records had to be changed.
        """
        name = self._bus.sender.name
        bucket = self._bus.bucket(subjects.REGISTRY_RECORD)
        loaded = []
        for entry in await bucket.entries(strict=True):
            # Under another's key it is not ours: its revision would make the true record's next write fail.
            if isinstance(entry.message, ServiceRecord) and entry.message.sid == entry.key:
                loaded.append(entry.message)
                self._writer.knows(entry.message.sid, entry.revision)
        me = ServiceRecord(
            sid=name,
            prefix="entity/service-registry",
            kind=EntityKind.SERVICE_REGISTRY,
            incarnation=self._incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="mesh", node=self.config.node, metrics=self._bus.metrics_url),
        )
        now = self._now()
        moved = self.core.load(loaded, now) | self.core.register(me, now)
        await self._confirmed()
        mine = self.core.packed(name)
        assert mine is not None
        revision = await bucket.put(mine, sid=name)
        self._writer.knows(name, revision)
        self.advertiser.revision = self.advertiser.advertised = revision
        return moved - {name}

    async def _unreadable(self, message: DeadLetter, envelope: Envelope) -> None:
        """Somebody could not read one of our records: what stands there is kept, and the record written."""
        found = subjects.REGISTRY_RECORD.matches(message.subject)
        if found is None or self.core.packed(found["sid"]) is None:
            return
        with contextlib.suppress(DmscError):
            await self._bus.bucket(subjects.REGISTRY_RECORD).get(leader=True, sid=found["sid"])
            return  # it has been written again
        self._writer.soon({found["sid"]})

    def _written(self, sids: Collection[str]) -> None:
        self.advertiser.written(sids)
        self._crowded = len(sids) > FEW
        if self._crowded:
            log.info("records changed", count=len(sids), records=len(self.core))

    # --- time -----------------------------------------------------------------------------------------
    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease.tick_s)
            if not self._bus.connected:
                continue  # we hear nobody: silence means nothing
            now = self._now()
            mine = Heartbeat(
                sid=self._bus.sender.name, incarnation=self._incarnation, state=InstanceState.ACTIVE
            )
            self.core.heartbeat(mine, now)
            touched = self.core.tick(now)
            if touched:
                log.warning("leases expired", count=len(touched), sids=sorted(touched)[:SHOWN])
                self._writer.soon(touched)

    async def _listen_for_departures(self) -> DurableSubscription | None:
        try:
            return await subscribe_disconnects(self._bus, self._departed)
        except Refused as error:
            log.info("closed connections are noticed by silence only", reason=error.text)
            return None

    def _departed(self, holder: str, why: str) -> None:
        if holder != self._holder and self.core.departed(holder, why, self._now()):
            log.info("connection closed", holder=holder, reason=why)

    async def _reconnected(self) -> None:
        """Nobody could be heard while we were cut off: everyone gets a lease again, and the full state."""
        self.core.forgive(self.config.lease.expiry_s, self._now())
        self.advertiser.full_soon()
