"""The leading registry: it alone answers, writes and advertises (draft §4.3 Types 1 and 2, §4.4(1), (6)).

Each change is in the bucket before it is answered and advertised. Every answer waits until the lead is
confirmed, so that a registry that was frozen never sends outdated answers.
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
from bus.tasks import background
from bus.wire.packed import Packed, assemble
from entities.election.lease import LeadershipLeaseConfig
from entities.presence.entity_record import entity_record
from entities.service_registry.advertiser import AdvertiseConfig, RegistryAdvertiser
from entities.service_registry.core import RegistrationLeaseConfig, RegistryCore
from entities.service_registry.record_authority import refuse_foreign, refuse_others_state, refuse_strange
from entities.service_registry.writer import RegistryWriter
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import Ack, BadMessage, Conflict, DmscError, NewerRecord, Refused
from schemas.registry import (
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
"""Up to this many changes of one batch get a log line each; larger batches get one line in all."""
TOGETHER = 256
"""Registrations decided in one batch: some ten milliseconds, in which nothing else runs."""
SHOWN = 8
"""SIDs shown in one log line."""


@dataclass(frozen=True, kw_only=True)
class ServiceRegistryConfig:
    """Settings of the registry."""

    lease: RegistrationLeaseConfig = field(default_factory=RegistrationLeaseConfig)
    advertise: AdvertiseConfig = field(default_factory=AdvertiseConfig)
    lead: LeadershipLeaseConfig = field(default_factory=LeadershipLeaseConfig)
    node: str = "mesh"
    page_records: int = 1024  # records per answer: what a reader decodes in one go
    page_bytes: int = 512 << 10  # and their size, below any server's largest message
    registering: int = 2048  # registrations handled at once; each waits for the bucket, so they share writes
    lot: int = 1000  # records written at once: what the server takes as one batch
    write_retry_s: float = 0.2  # pause before a failed write is repeated
    replicas: int = 1  # of streams and buckets: 1 on an embedded server, 3 on a cluster
    remembered_terminations: int = 1024  # jobs whose termination reports are kept for the release's answer


class RegistryLeader:
    """One term of a registry."""

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
        self._large_batch = False
        self.refused: NewerRecord | None = None
        self._drain = True  # whether requests in flight are still answered at the end
        self._termination_reports: dict[str, set[str]] = {}
        self._writer = RegistryWriter(
            bus.bucket(subjects.REGISTRY_RECORD),
            self.core.packed,
            confirmed,
            self._written,
            lot=config.lot,
            retry_s=config.write_retry_s,
        )
        self.advertiser = RegistryAdvertiser(bus, self.core, config.advertise, confirmed, 0)

    async def run(self, keeping: asyncio.Task[str], began: Callable[[], Awaitable[None]]) -> str:
        """Leads until `keeping` ends, or until it meets a record of a newer version; returns why.

        If another registry leads, requests in flight are not answered any more.
        """
        self._bus.pulse.attend()
        with self._bus.pulse.held():  # leases use its clock: a server that stands still silences everybody
            try:
                async with background(self._serve(began), name="serve") as serving:
                    await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
                    if serving.done():
                        serving.result()
                    self._drain = False
                    return keeping.result()
            except NewerRecord as error:
                self.refused = error
                return error.text

    async def _serve(self, began: Callable[[], Awaitable[None]]) -> None:
        """Take over the bucket's records, call `began`, then serve until cancelled."""
        moved = await self._reload()
        forget = self._bus.on_reconnect(self._on_reconnect)
        subscriptions: list[Subscription] = []
        disconnects = await self._subscribe_disconnects()
        bus, many = self._bus, self.config.registering
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writer.run(), name="write")
                subscriptions += [
                    await bus.serve_batches(
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
                await began()
                try:
                    await self._watch_silence()
                finally:
                    stops = [subscription.stop(drain=self._drain) for subscription in subscriptions]
                    await asyncio.gather(*stops, return_exceptions=True)
        finally:
            forget()
            if disconnects is not None:
                await self._bus.connection.unsubscribe(disconnects)

    # --- Type 1 and discovery ------------------------------------------------------------------------
    async def _register(
        self, requests: Sequence[tuple[Registration, Envelope]]
    ) -> list[RegistrationLease | DmscError]:
        """A batch of registrations: decided one by one, written and answered together."""
        return await self._admit_all(requests, self._admit)

    async def _register_failed(self, message: Registration, envelope: Envelope) -> RegistrationLease:
        """A node agent registers an instance that failed before it could register itself."""
        (answer,) = await self._admit_all([(message, envelope)], self._admit_failed)
        if isinstance(answer, DmscError):
            raise answer
        return answer

    async def _admit_all(
        self,
        requests: Sequence[tuple[Registration, Envelope]],
        admit: Callable[[ServiceRecord, Sender, float], frozenset[str]],
    ) -> list[RegistrationLease | DmscError]:
        await self._confirmed()
        now = self._now()
        touched: set[str] = set()
        refusals: dict[int, DmscError] = {}
        for number, (message, envelope) in enumerate(requests):
            try:
                touched |= admit(message.record, envelope.sender, now)
            except DmscError as error:
                refusals[number] = error
        admitted = {
            message.record.sid for number, (message, _) in enumerate(requests) if number not in refusals
        }
        unwritten = await self._writer.write_each(touched)
        await self._writer.settled(admitted - touched)
        if touched and not self._large_batch:
            for record in (message.record for message, _ in requests if message.record.sid in touched):
                log.info("registered", sid=record.sid, state=record.state, incarnation=record.incarnation)
        return [
            refusals.get(number) or unwritten.get(message.record.sid) or self._lease(message.record.sid)
            for number, (message, _) in enumerate(requests)
        ]

    def _admit(self, record: ServiceRecord, sender: Sender, now: float) -> frozenset[str]:
        if record.sid == self._bus.sender.name:
            raise BadMessage(f"sid {record.sid} is the registry's own; choose another", sid=record.sid)
        if self._bus.connection.guarded:  # on an open bus, senders' names are not verified
            refuse_strange(record, sender)
        return self.core.register(record, now, connection_name(sender))

    def _admit_failed(self, record: ServiceRecord, speaker: Sender, now: float) -> frozenset[str]:
        if self._bus.connection.guarded:
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
        """A node agent reports the state of one of its instances."""
        await self._confirmed()
        if self._bus.connection.guarded:
            refuse_others_state(message.sid, envelope.sender.name, self.core.record(message.sid))
        return await self._move(message)

    async def _move(self, message: StateChange) -> Ack:
        touched = self.core.change(message, self._now())
        await self._writer.write(touched)
        if touched and not self._large_batch:
            log.info("state changed", sid=message.sid, state=message.state, reason=message.reason)
        return Ack()

    async def _resolve(self, message: Resolve, envelope: Envelope) -> Packed[Resolved]:
        await self._confirmed()
        await self.advertiser.flush()  # else the next delta would not build on this answer's revision
        page, after = self.core.page(message, self.config.page_bytes, self.config.page_records)
        head = {"revision": self.advertiser.advertised, "next_after": after}
        return assemble(Resolved, head, {"records": page})

    async def _release(self, message: ReleaseJob, envelope: Envelope) -> Ack:
        await self._confirmed()
        touched = self.core.release(message.job)
        await self._writer.write(touched)
        reporters = sorted(self._termination_reports.pop(message.job, set()))
        note = f"released {len(touched)} records; communication ended at {', '.join(reporters) or 'nobody'}"
        log.info("job released", job=message.job, records=len(touched), ended_at=reporters)
        return Ack(note=note)

    async def _termination(self, message: TerminationReport, envelope: Envelope) -> None:
        self._termination_reports.setdefault(message.job, set()).add(message.sid)
        while len(self._termination_reports) > self.config.remembered_terminations:
            self._termination_reports.pop(next(iter(self._termination_reports)))
        log.info("communication ended", job=message.job, at=message.sid, microbatches=message.microbatches)

    # --- the bucket is the truth ---------------------------------------------------------------------
    async def _reload(self) -> frozenset[str]:
        """Read the bucket, then write our own record, whose revision is above all earlier ones.

        Returns the SIDs whose records had to be changed.
        """
        name = self._bus.sender.name
        bucket = self._bus.bucket(subjects.REGISTRY_RECORD)
        records = []
        for entry in await bucket.entries(strict=True):
            # A record under a foreign key is skipped: its revision would fail the true record's next write.
            if isinstance(entry.message, ServiceRecord) and entry.message.sid == entry.key:
                records.append(entry.message)
                self._writer.knows(entry.message.sid, entry.revision)
        own_record = entity_record(
            EntityKind.SERVICE_REGISTRY,
            name,
            self._incarnation,
            node=self.config.node,
            metrics=self._bus.metrics_url,
        )
        now = self._now()
        moved = self.core.load(records, now) | self.core.register(own_record, now)
        await self._confirmed()
        packed = self.core.packed(name)
        assert packed is not None
        revision = await bucket.put(packed, sid=name)
        self._writer.knows(name, revision)
        self.advertiser.revision = self.advertiser.advertised = revision
        return moved - {name}

    async def _unreadable(self, message: DeadLetter, envelope: Envelope) -> None:
        """Rewrite one of our records that a reader could not read; the unreadable value was archived."""
        tokens = subjects.REGISTRY_RECORD.matches(message.subject)
        if tokens is None or self.core.packed(tokens["sid"]) is None:
            return
        with contextlib.suppress(DmscError):
            await self._bus.bucket(subjects.REGISTRY_RECORD).get(leader=True, sid=tokens["sid"])
            return  # it has been written again
        self._writer.soon({tokens["sid"]})

    def _written(self, sids: Collection[str]) -> None:
        self.advertiser.written(sids)
        self._large_batch = len(sids) > FEW
        if self._large_batch:
            log.info("records changed", count=len(sids), records=len(self.core))

    # --- time -----------------------------------------------------------------------------------------
    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease.tick_s)
            if not self._bus.connected:
                continue  # nothing can be heard, so silence means nothing
            now = self._now()
            own_beat = Heartbeat(
                sid=self._bus.sender.name, incarnation=self._incarnation, state=InstanceState.ACTIVE
            )
            self.core.heartbeat(own_beat, now)
            touched = self.core.tick(now)
            if touched:
                log.warning("leases expired", count=len(touched), sids=sorted(touched)[:SHOWN])
                self._writer.soon(touched)

    async def _subscribe_disconnects(self) -> DurableSubscription | None:
        try:
            return await subscribe_disconnects(self._bus, self._connection_closed)
        except Refused as error:
            log.info("closed connections are noticed by silence only", reason=error.text)
            return None

    def _connection_closed(self, holder: str, why: str) -> None:
        if holder != self._holder and self.core.departed(holder, why, self._now()):
            log.info("connection closed", holder=holder, reason=why)

    async def _on_reconnect(self) -> None:
        """Nothing could be heard while disconnected: extend every lease and advertise the full state."""
        self.core.forgive(self.config.lease.expiry_s, self._now())
        self.advertiser.full_soon()
        try:
            await self._remove_revived()
        except DmscError as error:  # another registry leads, or the next reconnect tries again
            log.info("removed records not looked for", reason=error.text)

    async def _remove_revived(self) -> None:
        """Removes what was removed before and is there again (`bus.messaging.stream_specs.MARKERS_STAY`)."""
        await self._confirmed()
        bucket = self._bus.bucket(subjects.REGISTRY_RECORD)
        revived = [
            entry
            for entry in await bucket.entries()
            if isinstance(entry.message, ServiceRecord)
            and entry.message.sid == entry.key
            and self.core.packed(entry.key) is None
        ]
        for entry in revived:
            with contextlib.suppress(Conflict):
                await bucket.delete(revision=entry.revision, sid=entry.key)
        if revived:
            log.warning(
                "removed records were there again",
                count=len(revived),
                sids=[entry.key for entry in revived][:SHOWN],
            )
