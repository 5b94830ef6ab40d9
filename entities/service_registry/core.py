"""The registry's decisions, without I/O and without a clock (draft §3 SRD, §4.5(2–3)).

`RegistryCore` holds the records and answers every event with the SIDs whose record changed; `leader.py`
writes those to the bucket and advertises them. Times come in as arguments (seconds of one monotonic clock);
timestamps of senders are ignored.

Records are kept packed: as pydantic models they take ten times the memory, and packing them anew for each
reader would take longer than everything else.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from bus.wire.packed import Packed, pack
from entities.service_registry.content_index import ContentGroup, RegistryIndex, RouteIds
from schemas.envelope import EntityKind
from schemas.errors import BadMessage, Fenced, IllegalTransition, NotFound
from schemas.registry import (
    INSTANCE_TRANSITIONS,
    SILENT,
    Culprit,
    Heartbeat,
    InstanceState,
    Resolve,
    ServiceRecord,
    StateChange,
)

_FENCES_PER_SID = 16
_HEARTBEAT_REASON = "said its heartbeat"
_HISTORY = 16
_ENDED = (InstanceState.FAULTED, InstanceState.GONE)
_NOTHING: frozenset[str] = frozenset()
MOST_RECORD_BYTES = 64 << 10
"""A record is some hundred bytes; many of the largest still fit into one message."""


@dataclass(frozen=True, kw_only=True)
class RegistrationLeaseConfig:
    """How long a registration lives without a sign of life."""

    heartbeat_s: float = 1.0  # interval requested of each holder; smaller finds deaths sooner, costs messages
    expiry_s: float = 6.0  # silence after which a record counts as lost; ≥ 3 heartbeats, as beats may be lost
    departed_s: float = 2.0  # the same once the bus reports the holder's connection closed; ≥ a reconnect
    tick_s: float = 0.5  # how often leases are checked; a death is seen within expiry_s + tick_s
    remembered_sids: int = 10_000  # gone instances whose incarnations stay fenced (~200 bytes each)

    def __post_init__(self) -> None:
        if not self.heartbeat_s > 0:
            raise ValueError(f"heartbeat_s is {self.heartbeat_s}; it must be above 0")
        if self.expiry_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"expiry_s is {self.expiry_s} with heartbeat_s {self.heartbeat_s}; "
                "it must be at least 3 heartbeats, as heartbeats may be lost"
            )
        if not 0 < self.tick_s <= self.expiry_s / 3:
            raise ValueError(f"tick_s is {self.tick_s}; it must be above 0 and at most a third of expiry_s")
        if not self.departed_s > 0:
            raise ValueError(f"departed_s is {self.departed_s}; it must be above 0")


@dataclass(slots=True)
class LeasedRecord:
    """A record with its lease. Fields that every heartbeat and query reads stand beside the packed record."""

    packed: Packed[ServiceRecord]
    incarnation: str
    state: InstanceState
    route_id: int
    memory_bytes: int
    flops_per_s: float
    replaced: tuple[str, ...]
    group: ContentGroup
    last_heard: float
    holder: str  # the connection that registered it or sent its last heartbeat
    history: tuple[str, ...] = ()

    @property
    def record(self) -> ServiceRecord:
        return self.packed.open()

    def note(self, line: str) -> None:
        self.history = (*self.history, line)[-_HISTORY:]


class Holders:
    """The SIDs of each connection, in order. Most connections have one SID; one may have thousands."""

    def __init__(self) -> None:
        self._sids: dict[str, dict[str, None]] = {}

    def add(self, holder: str, sid: str) -> None:
        if holder:
            self._sids.setdefault(holder, {})[sid] = None

    def remove(self, holder: str, sid: str) -> None:
        sids = self._sids.get(holder)
        if sids is None:
            return
        sids.pop(sid, None)
        if not sids:
            del self._sids[holder]

    def of(self, holder: str) -> tuple[str, ...]:
        return tuple(self._sids.get(holder, ()))


class RegistryCore:
    """All records. Every event returns the SIDs whose record was changed or removed.

    One rule decides about incarnations: an incarnation that was never seen for its SID replaces the present
    one and fences it for good; a fenced incarnation can neither renew nor overwrite (`Fenced`).
    """

    def __init__(self, config: RegistrationLeaseConfig) -> None:
        self.config = config
        self._leases: dict[str, LeasedRecord] = {}
        self._ordered: list[LeasedRecord] | None = None  # by route id; built when a snapshot is requested
        self._index = RegistryIndex()
        self._holders = Holders()
        self._departed: dict[str, tuple[float, str]] = {}
        self._routes = RouteIds()
        self._fences: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._last_tick: float | None = None
        self.stale_beats = 0

    # --- reading -------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._leases)

    @property
    def examined(self) -> int:
        """Groups and members that the last query looked at."""
        return self._index.examined

    @property
    def fenced_sids(self) -> int:
        """Gone instances whose incarnations are remembered."""
        return len(self._fences)

    def record(self, sid: str) -> ServiceRecord | None:
        lease = self._leases.get(sid)
        return lease.record if lease else None

    def packed(self, sid: str) -> Packed[ServiceRecord] | None:
        """The record as it is sent and written."""
        lease = self._leases.get(sid)
        return lease.packed if lease else None

    def route_id(self, sid: str) -> int:
        """0 if there is no such record."""
        lease = self._leases.get(sid)
        return lease.route_id if lease else 0

    def sids(self) -> tuple[str, ...]:
        """All SIDs in order of route id."""
        return tuple(sorted(self._leases, key=lambda sid: self._leases[sid].route_id))

    def records(self) -> tuple[ServiceRecord, ...]:
        """All records in order of route id."""
        return tuple(self._leases[sid].record for sid in self.sids())

    def resolve(self, query: Resolve) -> tuple[ServiceRecord, ...]:
        """Discovery by content (draft §1): every given filter must match; in order of route id."""
        return tuple(lease.record for lease in self._find(query))

    def page(
        self, query: Resolve, most_bytes: int, most_records: int
    ) -> tuple[list[Packed[ServiceRecord]], int]:
        """The matches behind `query.after`, packed, and the next page's `after`: 0 if there is no more."""
        page: list[Packed[ServiceRecord]] = []
        size, last = 0, 0
        for lease in self._find(query):
            size += len(lease.packed.body)
            if page and (size > most_bytes or len(page) == most_records):
                return page, last
            page.append(lease.packed)
            last = lease.route_id
        return page, 0

    def _find(self, query: Resolve) -> list[LeasedRecord]:
        if query == Resolve(after=query.after):
            if self._ordered is None:
                self._ordered = sorted(self._leases.values(), key=_route_of)
            return self._ordered[bisect.bisect_right(self._ordered, query.after, key=_route_of) :]
        if query.sid is not None:
            lease = self._leases.get(query.sid)
            candidates = [lease] if lease is not None and lease.group.content.matches(query) else []
        else:
            candidates = [self._leases[sid] for sid in self._index.find(query)]
        # Opening a record takes longer than all other filters: only for what stands in it alone.
        asks_more = query.precision is not None or query.bits_class is not None
        matches = [
            lease
            for lease in candidates
            if lease.route_id > query.after
            and lease.memory_bytes >= query.min_memory_bytes
            and lease.flops_per_s >= query.min_flops_per_s
            and (not asks_more or query.matches(lease.record))
        ]
        matches.sort(key=_route_of)
        return matches

    # --- events ----------------------------------------------------------------------------------------
    def load(self, records: Iterable[ServiceRecord], now: float) -> frozenset[str]:
        """Take over the bucket's records after a restart; each gets a whole lease from `now`."""
        touched: set[str] = set()
        for record in sorted(records, key=lambda record: record.route_id):
            route_id = self._routes.take(record.route_id)
            if route_id != record.route_id:
                record = record.model_copy(update={"route_id": route_id})
                touched.add(record.sid)
            self._add(record, now, "").note(f"{record.state}: loaded")
        return frozenset(touched)

    def register(self, record: ServiceRecord, now: float, holder: str = "") -> frozenset[str]:
        """Type 1: a new SID, a new incarnation, an update, or a renewal (which changes nothing).

        `holder` names the connection that sent it; `departed` reports that this connection closed.
        """
        lease = self._leases.get(record.sid)
        if record.incarnation in self._fences_of(record.sid):
            raise self._fence_error(record.sid, record.incarnation)
        if lease is None or lease.incarnation != record.incarnation:
            return self._admit(record, lease, now, holder)
        if record.state is not lease.state:
            self._check_transition(record.sid, lease, record.state, record.reason)
        lease.last_heard = now
        self._set_holder(record.sid, lease, holder)
        before = lease.record
        unchanged: dict[str, object] = {"route_id": before.route_id, "replaced": before.replaced}
        if record.state is before.state and not record.reason:
            unchanged |= {"reason": before.reason, "fault": before.fault, "culprit": before.culprit}
        return self._store(lease, before, record.model_copy(update=unchanged))

    def heartbeat(self, beat: Heartbeat, now: float, holder: str = "") -> frozenset[str]:
        """A sign of life. It carries the state, which makes up for a lost `StateChange`."""
        lease = self._leases.get(beat.sid)
        if lease is None or lease.incarnation != beat.incarnation:
            self.stale_beats += 1
            return _NOTHING
        lease.last_heard = now
        if holder and lease.holder != holder:
            self._set_holder(beat.sid, lease, holder)
        if beat.state is lease.state or beat.state not in INSTANCE_TRANSITIONS[lease.state]:
            return _NOTHING
        return self._move(lease, lease.record, beat.state, _HEARTBEAT_REASON)

    def change(self, change: StateChange, now: float) -> frozenset[str]:
        """A state change, reported by the incarnation itself or by its node agent."""
        lease = self._leases.get(change.sid)
        if change.incarnation in self._fences_of(change.sid):
            raise self._fence_error(change.sid, change.incarnation)
        if lease is None or lease.incarnation != change.incarnation:
            raise NotFound(
                f"{change.sid}: incarnation {change.incarnation} is not registered; register it first",
                sid=change.sid,
                incarnation=change.incarnation,
            )
        record = lease.record
        if change.state is record.state:
            faster = record.reason == _HEARTBEAT_REASON  # this message adds the reason
            if not faster and (change.state in _ENDED or not change.reason):
                return _NOTHING  # a repetition; the first reason of an end stays
            return self._move(lease, record, change.state, change.reason, change.fault, change.culprit)
        self._check_transition(change.sid, lease, change.state, change.reason)
        return self._move(lease, record, change.state, change.reason, change.fault, change.culprit)

    def release(self, job: str) -> frozenset[str]:
        """Draft §4.4(6): forget the job's records and release their route ids."""
        sids = frozenset(self._index.find(Resolve.model_construct(job=job)))
        for sid in sids:
            self._remove(sid)
        return sids

    def departed(self, holder: str, why: str, now: float) -> int:
        """The bus reports that this connection closed, which is only a hint.

        Its records count as lost if nothing is heard of them over any connection for `departed_s` from now.
        Returns how many records the connection has.
        """
        sids = self._holders.of(holder)
        for sid in sids:
            self._departed[sid] = (now, why)
        return len(sids)

    def tick(self, now: float) -> frozenset[str]:
        """Expire silent leases. Time in which this process itself did not run is not counted."""
        last, self._last_tick = self._last_tick, now
        if last is not None:
            lag = now - last - self.config.tick_s
            if lag > self.config.heartbeat_s:
                self.forgive(lag, now)
        touched: set[str] = set()
        for sid, (since, why) in list(self._departed.items()):
            lease = self._leases.get(sid)
            if lease is None or lease.last_heard > since:
                del self._departed[sid]  # it is back
            elif now - since > self.config.departed_s:
                del self._departed[sid]
                reason = f"its connection closed ({why}), and nothing more for {now - since:.1f} s"
                touched |= self._expire(sid, lease, reason)
        limit = now - self.config.expiry_s
        silent = [(sid, lease) for sid, lease in self._leases.items() if lease.last_heard < limit]
        for sid, lease in silent:
            touched |= self._expire(sid, lease, f"{SILENT} for {now - lease.last_heard:.1f} s")
        return frozenset(touched)

    def forgive(self, lag: float, now: float) -> None:
        """Extend every lease by `lag` seconds, to at least two heartbeats: beats may wait in our socket."""
        least = now - self.config.expiry_s + 2 * self.config.heartbeat_s
        for lease in self._leases.values():
            lease.last_heard = min(now, max(lease.last_heard + lag, least))
        self._departed = {sid: (max(since, now), why) for sid, (since, why) in self._departed.items()}

    # --- inside ------------------------------------------------------------------------------------------
    def _add(
        self, record: ServiceRecord, now: float, holder: str, packed: Packed[ServiceRecord] | None = None
    ) -> LeasedRecord:
        """Add a record under a free SID."""
        self._ordered = None
        lease = self._leases[record.sid] = LeasedRecord(
            packed=packed or pack(record),
            incarnation=record.incarnation,
            state=record.state,
            route_id=record.route_id,
            memory_bytes=_most_memory(record),
            flops_per_s=record.capability.flops_per_s,
            replaced=record.replaced,
            group=self._index.add(record.sid, record),
            last_heard=now,
            holder=holder,
        )
        self._holders.add(holder, record.sid)
        return lease

    def _set_holder(self, sid: str, lease: LeasedRecord, holder: str) -> None:
        if holder and lease.holder != holder:
            self._holders.remove(lease.holder, sid)
            self._holders.add(holder, sid)
            lease.holder = holder

    def _drop(self, sid: str) -> LeasedRecord:
        lease = self._leases.pop(sid)
        self._ordered = None
        self._index.remove(sid, lease.group)
        self._holders.remove(lease.holder, sid)
        self._departed.pop(sid, None)
        return lease

    def _admit(
        self, record: ServiceRecord, before: LeasedRecord | None, now: float, holder: str
    ) -> frozenset[str]:
        if record.state is InstanceState.GONE:
            return _NOTHING
        fences = self._fences_of(record.sid)
        history: tuple[str, ...] = ()
        if before is not None:
            fences = (*fences, before.incarnation)
            route_id = before.route_id
            history = (f"incarnation {before.incarnation} was {before.state}",)
        else:
            route_id = self._routes.take(record.route_id)
        admitted = record.model_copy(update={"route_id": route_id, "replaced": fences[-_FENCES_PER_SID:]})
        try:
            packed = _bounded(admitted)
        except BadMessage:
            if before is None:
                self._routes.release(route_id)
            raise
        if before is not None:
            self._drop(record.sid)
        self._fences.pop(record.sid, None)
        lease = self._add(admitted, now, holder, packed)
        lease.history = history
        lease.note(f"{record.state}: registered as {record.incarnation}")
        return frozenset({record.sid})

    def _expire(self, sid: str, lease: LeasedRecord, reason: str) -> frozenset[str]:
        if lease.group.content.kind is not EntityKind.INSTANCE:
            # A service may come back with the same incarnation (a broken network): no fence, no fault.
            self._routes.release(lease.route_id)
            self._drop(sid)
            return frozenset({sid})
        if lease.state is InstanceState.FAULTED:
            return _NOTHING
        return self._move(lease, lease.record, InstanceState.FAULTED, reason)

    def _move(
        self,
        lease: LeasedRecord,
        record: ServiceRecord,
        state: InstanceState,
        reason: str,
        fault: str = "",
        culprit: Culprit | None = None,
    ) -> frozenset[str]:
        if state is InstanceState.GONE:
            self._remove(record.sid)
            return frozenset({record.sid})
        update = {"state": state, "reason": reason, "fault": fault, "culprit": culprit}
        return self._store(lease, record, record.model_copy(update=update))

    def _store(self, lease: LeasedRecord, before: ServiceRecord, record: ServiceRecord) -> frozenset[str]:
        if record == before:
            return _NOTHING
        if record.state is InstanceState.GONE:
            self._remove(record.sid)
            return frozenset({record.sid})
        packed = _bounded(record)
        if record.state is not before.state:
            lease.note(f"{record.state}: {record.reason}" if record.reason else str(record.state))
        self._index.remove(record.sid, lease.group)
        lease.group = self._index.add(record.sid, record)
        lease.packed = packed
        lease.state = record.state
        lease.memory_bytes = _most_memory(record)
        lease.flops_per_s = record.capability.flops_per_s
        return frozenset({record.sid})

    def _remove(self, sid: str) -> None:
        lease = self._drop(sid)
        self._routes.release(lease.route_id)
        if lease.group.content.kind is EntityKind.INSTANCE:
            # A late duplicate of its registration must not bring it back.
            self._fences[sid] = (*lease.replaced, lease.incarnation)[-_FENCES_PER_SID:]
            while len(self._fences) > self.config.remembered_sids:
                self._fences.popitem(last=False)

    def _fences_of(self, sid: str) -> tuple[str, ...]:
        lease = self._leases.get(sid)
        return lease.replaced if lease else self._fences.get(sid, ())

    def _fence_error(self, sid: str, incarnation: str) -> Fenced:
        lease = self._leases.get(sid)
        status = f"replaced by {lease.incarnation}" if lease else "gone"
        return Fenced(
            f"{sid}: incarnation {incarnation} is {status}; it may neither renew nor overwrite",
            sid=sid,
            incarnation=incarnation,
        )

    def _check_transition(self, sid: str, lease: LeasedRecord, state: InstanceState, reason: str) -> None:
        if state in INSTANCE_TRANSITIONS[lease.state]:
            return
        history = " → ".join(lease.history)
        raise IllegalTransition(
            f"{sid}: {lease.state} → {state} ({reason or 'no reason given'}) is not allowed; "
            f"history: {history}",
            sid=sid,
            incarnation=lease.incarnation,
            history=history,
        )


def _route_of(lease: LeasedRecord) -> int:
    return lease.route_id


def _most_memory(record: ServiceRecord) -> int:
    """Of one place: what a node's slots have together is of use to none of them."""
    return max(place.memory_bytes for place in record.offers or (record.capability,))


def _bounded(record: ServiceRecord) -> Packed[ServiceRecord]:
    packed = pack(record)
    if len(packed.body) > MOST_RECORD_BYTES:
        raise BadMessage(
            f"{record.sid}: a record of {len(packed.body):,} bytes; the registry takes {MOST_RECORD_BYTES:,}",
            reason="oversized",
            sid=record.sid,
        )
    return packed
