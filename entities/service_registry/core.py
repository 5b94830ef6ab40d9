"""The registry's decisions, without I/O and without a clock (draft §3 SRD, §4.5(2–3)).

`RegistryCore` holds the records and answers every event with the SIDs whose record changed; the shell
(`service_registry.py`) writes those to the bucket and advertises them. Times come in as arguments
(seconds of one monotonic clock); what senders say about time is never looked at.

Records are kept packed: as pydantic models they take ten times the memory, and packing them for each reader
anew would take longer than all the rest.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from bus.wire.packed import Packed, pack
from entities.service_registry.index import ContentGroup, RegistryIndex, RouteIds
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
_BY_HEARTBEAT = "said its heartbeat"
_HISTORY = 16
_OVER = (InstanceState.FAULTED, InstanceState.GONE)
_NOBODY: frozenset[str] = frozenset()
MOST_RECORD_BYTES = 64 << 10
"""A record is some hundred bytes; many of the largest still fit into one message."""


@dataclass(frozen=True, kw_only=True)
class RegistrationLeaseConfig:
    """How long a registration lives without a sign of life."""

    heartbeat_s: float = 1.0  # asked of each holder; smaller finds deaths sooner, costs messages
    expiry_s: float = 6.0  # silence after which a record counts as lost; ≥ 3 heartbeats, as beats may be lost
    departed_s: float = 2.0  # the same once the bus says that the holder's connection closed; ≥ a reconnect
    tick_s: float = 0.5  # how often silence is looked for; a death is seen within expiry_s + tick_s
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
    """A record with its lease. What every heartbeat and query looks at stands beside the packed record."""

    packed: Packed[ServiceRecord]
    incarnation: str
    state: InstanceState
    route_id: int
    memory_bytes: int
    flops_per_s: float
    replaced: tuple[str, ...]
    group: ContentGroup
    heard: float
    holder: str  # the connection that it came over
    history: tuple[str, ...] = ()

    @property
    def record(self) -> ServiceRecord:
        return self.packed.open()

    def note(self, line: str) -> None:
        self.history = (*self.history, line)[-_HISTORY:]


class Holders:
    """Which SIDs came over which connection, in order. Nearly all have one; a door may have thousands."""

    def __init__(self) -> None:
        self._sids: dict[str, dict[str, None]] = {}

    def add(self, holder: str, sid: str) -> None:
        if holder:
            self._sids.setdefault(holder, {})[sid] = None

    def remove(self, holder: str, sid: str) -> None:
        left = self._sids.get(holder)
        if left is None:
            return
        left.pop(sid, None)
        if not left:
            del self._sids[holder]

    def of(self, holder: str) -> tuple[str, ...]:
        return tuple(self._sids.get(holder, ()))


class RegistryCore:
    """All records. Every event returns the SIDs whose record was changed or removed.

    One rule decides about incarnations: one that was never seen for its SID replaces the present one and
    fences it for good; a fenced one can neither renew nor overwrite (`Fenced`).
    """

    def __init__(self, config: RegistrationLeaseConfig) -> None:
        self.config = config
        self._held: dict[str, LeasedRecord] = {}
        self._ordered: list[LeasedRecord] | None = None  # by route id; made when a snapshot is asked for
        self._index = RegistryIndex()
        self._holders = Holders()
        self._departed: dict[str, tuple[float, str]] = {}
        self._routes = RouteIds()
        self._fences: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._last_tick: float | None = None
        self.stale_beats = 0

    # --- reading -------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._held)

    @property
    def examined(self) -> int:
        """Groups and members that the last query looked at."""
        return self._index.examined

    @property
    def fenced_sids(self) -> int:
        """Gone instances whose incarnations are remembered."""
        return len(self._fences)

    def record(self, sid: str) -> ServiceRecord | None:
        held = self._held.get(sid)
        return held.record if held else None

    def packed(self, sid: str) -> Packed[ServiceRecord] | None:
        """The record as it is sent and written."""
        held = self._held.get(sid)
        return held.packed if held else None

    def route_id(self, sid: str) -> int:
        """0 if there is no such record."""
        held = self._held.get(sid)
        return held.route_id if held else 0

    def sids(self) -> tuple[str, ...]:
        """All SIDs in order of route id."""
        return tuple(sorted(self._held, key=lambda sid: self._held[sid].route_id))

    def records(self) -> tuple[ServiceRecord, ...]:
        """All records in order of route id."""
        return tuple(self._held[sid].record for sid in self.sids())

    def resolve(self, query: Resolve) -> tuple[ServiceRecord, ...]:
        """Discovery by content (draft §1): every given filter must match; in order of route id."""
        return tuple(held.record for held in self._find(query))

    def page(
        self, query: Resolve, most_bytes: int, most_records: int
    ) -> tuple[list[Packed[ServiceRecord]], int]:
        """The matches behind `query.after`, packed, and the next page's `after`: 0 if there is no more."""
        page: list[Packed[ServiceRecord]] = []
        size, last = 0, 0
        for held in self._find(query):
            size += len(held.packed.body)
            if page and (size > most_bytes or len(page) == most_records):
                return page, last
            page.append(held.packed)
            last = held.route_id
        return page, 0

    def _find(self, query: Resolve) -> list[LeasedRecord]:
        if query == Resolve(after=query.after):
            if self._ordered is None:
                self._ordered = sorted(self._held.values(), key=_route_of)
            return self._ordered[bisect.bisect_right(self._ordered, query.after, key=_route_of) :]
        if query.sid is not None:
            named = self._held.get(query.sid)
            found = [named] if named is not None and named.group.content.matches(query) else []
        else:
            found = [self._held[sid] for sid in self._index.find(query)]
        wanted = [
            held
            for held in found
            if held.route_id > query.after
            and held.memory_bytes >= query.min_memory_bytes
            and held.flops_per_s >= query.min_flops_per_s
        ]
        wanted.sort(key=_route_of)
        return wanted

    # --- events ----------------------------------------------------------------------------------------
    def load(self, records: Iterable[ServiceRecord], now: float) -> frozenset[str]:
        """Take over what the bucket holds after a restart; everyone gets a whole lease from `now`."""
        touched: set[str] = set()
        for record in sorted(records, key=lambda record: record.route_id):
            route_id = self._routes.take(record.route_id)
            if route_id != record.route_id:
                record = record.model_copy(update={"route_id": route_id})
                touched.add(record.sid)
            self._hold(record, now, "").note(f"{record.state}: loaded")
        return frozenset(touched)

    def register(self, record: ServiceRecord, now: float, holder: str = "") -> frozenset[str]:
        """Type 1. New, a new incarnation, an update, or a renewal (which changes nothing).

        `holder` names the connection that it came over: `departed` tells of its end.
        """
        held = self._held.get(record.sid)
        if record.incarnation in self._fenced(record.sid):
            raise self._fence_error(record.sid, record.incarnation)
        if held is None or held.incarnation != record.incarnation:
            return self._admit(record, held, now, holder)
        if record.state is not held.state:
            self._check_transition(record.sid, held, record.state, record.reason)
        held.heard = now
        self._held_by(record.sid, held, holder)
        before = held.record
        kept: dict[str, object] = {"route_id": before.route_id, "replaced": before.replaced}
        if record.state is before.state and not record.reason:
            kept |= {"reason": before.reason, "fault": before.fault, "culprit": before.culprit}
        return self._store(held, before, record.model_copy(update=kept))

    def heartbeat(self, beat: Heartbeat, now: float, holder: str = "") -> frozenset[str]:
        """A sign of life. It carries the state, so that a lost `StateChange` is made good."""
        held = self._held.get(beat.sid)
        if held is None or held.incarnation != beat.incarnation:
            self.stale_beats += 1
            return _NOBODY
        held.heard = now
        if holder and held.holder != holder:
            self._held_by(beat.sid, held, holder)
        if beat.state is held.state or beat.state not in INSTANCE_TRANSITIONS[held.state]:
            return _NOBODY
        return self._move(held, held.record, beat.state, _BY_HEARTBEAT)

    def change(self, change: StateChange, now: float) -> frozenset[str]:
        """A state moved, as told by the incarnation itself or by its node agent."""
        held = self._held.get(change.sid)
        if change.incarnation in self._fenced(change.sid):
            raise self._fence_error(change.sid, change.incarnation)
        if held is None or held.incarnation != change.incarnation:
            raise NotFound(
                f"{change.sid}: incarnation {change.incarnation} is not registered; register it first",
                sid=change.sid,
                incarnation=change.incarnation,
            )
        record = held.record
        if change.state is record.state:
            faster = record.reason == _BY_HEARTBEAT  # the heartbeat was faster: here is why
            if not faster and (change.state in _OVER or not change.reason):
                return _NOBODY  # a repetition; of how it ended the first word counts
            return self._move(held, record, change.state, change.reason, change.fault, change.culprit)
        self._check_transition(change.sid, held, change.state, change.reason)
        return self._move(held, record, change.state, change.reason, change.fault, change.culprit)

    def release(self, job: str) -> frozenset[str]:
        """Draft §4.4(6): forget the job's records and release their route ids."""
        sids = frozenset(self._index.find(Resolve.model_construct(job=job)))
        for sid in sids:
            self._remove(sid)
        return sids

    def departed(self, holder: str, why: str, now: float) -> int:
        """The bus says that this connection closed: a hint. Who is not heard of for `departed_s` from now
        on, over whatever connection, counts as lost. Returns how many records hang on it."""
        sids = self._holders.of(holder)
        for sid in sids:
            self._departed[sid] = (now, why)
        return len(sids)

    def tick(self, now: float) -> frozenset[str]:
        """Look for silence. Time in which we ourselves did not run counts for nobody."""
        last, self._last_tick = self._last_tick, now
        if last is not None:
            lag = now - last - self.config.tick_s
            if lag > self.config.heartbeat_s:
                self.forgive(lag, now)
        touched: set[str] = set()
        for sid, (since, why) in list(self._departed.items()):
            held = self._held.get(sid)
            if held is None or held.heard > since:
                del self._departed[sid]  # it is back
            elif now - since > self.config.departed_s:
                del self._departed[sid]
                reason = f"its connection closed ({why}), and nothing more for {now - since:.1f} s"
                touched |= self._expire(sid, held, reason)
        limit = now - self.config.expiry_s
        silent = [(sid, held) for sid, held in self._held.items() if held.heard < limit]
        for sid, held in silent:
            touched |= self._expire(sid, held, f"{SILENT} for {now - held.heard:.1f} s")
        return frozenset(touched)

    def forgive(self, lag: float, now: float) -> None:
        """Extend every lease by `lag` seconds, and to two heartbeats at least: theirs wait in our socket."""
        least = now - self.config.expiry_s + 2 * self.config.heartbeat_s
        for held in self._held.values():
            held.heard = min(now, max(held.heard + lag, least))
        self._departed = {sid: (max(since, now), why) for sid, (since, why) in self._departed.items()}

    # --- inside ------------------------------------------------------------------------------------------
    def _hold(
        self, record: ServiceRecord, now: float, holder: str, packed: Packed[ServiceRecord] | None = None
    ) -> LeasedRecord:
        """Files a record under a SID that is free."""
        self._ordered = None
        held = self._held[record.sid] = LeasedRecord(
            packed=packed or pack(record),
            incarnation=record.incarnation,
            state=record.state,
            route_id=record.route_id,
            memory_bytes=record.capability.memory_bytes,
            flops_per_s=record.capability.flops_per_s,
            replaced=record.replaced,
            group=self._index.add(record.sid, record),
            heard=now,
            holder=holder,
        )
        self._holders.add(holder, record.sid)
        return held

    def _held_by(self, sid: str, held: LeasedRecord, holder: str) -> None:
        if holder and held.holder != holder:
            self._holders.remove(held.holder, sid)
            self._holders.add(holder, sid)
            held.holder = holder

    def _drop(self, sid: str) -> LeasedRecord:
        held = self._held.pop(sid)
        self._ordered = None
        self._index.remove(sid, held.group)
        self._holders.remove(held.holder, sid)
        self._departed.pop(sid, None)
        return held

    def _admit(
        self, record: ServiceRecord, before: LeasedRecord | None, now: float, holder: str
    ) -> frozenset[str]:
        if record.state is InstanceState.GONE:
            return _NOBODY
        fenced = self._fenced(record.sid)
        history: tuple[str, ...] = ()
        if before is not None:
            fenced = (*fenced, before.incarnation)
            route_id = before.route_id
            history = (f"incarnation {before.incarnation} was {before.state}",)
        else:
            route_id = self._routes.take(record.route_id)
        admitted = record.model_copy(update={"route_id": route_id, "replaced": fenced[-_FENCES_PER_SID:]})
        try:
            packed = _bounded(admitted)
        except BadMessage:
            if before is None:
                self._routes.release(route_id)
            raise
        if before is not None:
            self._drop(record.sid)
        self._fences.pop(record.sid, None)
        held = self._hold(admitted, now, holder, packed)
        held.history = history
        held.note(f"{record.state}: registered as {record.incarnation}")
        return frozenset({record.sid})

    def _expire(self, sid: str, held: LeasedRecord, reason: str) -> frozenset[str]:
        if held.group.content.kind is not EntityKind.INSTANCE:
            # A service may come back with the same incarnation (a broken network): no fence, no fault.
            self._routes.release(held.route_id)
            self._drop(sid)
            return frozenset({sid})
        if held.state is InstanceState.FAULTED:
            return _NOBODY
        return self._move(held, held.record, InstanceState.FAULTED, reason)

    def _move(
        self,
        held: LeasedRecord,
        record: ServiceRecord,
        state: InstanceState,
        reason: str,
        fault: str = "",
        culprit: Culprit | None = None,
    ) -> frozenset[str]:
        if state is InstanceState.GONE:
            self._remove(record.sid)
            return frozenset({record.sid})
        moved = {"state": state, "reason": reason, "fault": fault, "culprit": culprit}
        return self._store(held, record, record.model_copy(update=moved))

    def _store(self, held: LeasedRecord, before: ServiceRecord, record: ServiceRecord) -> frozenset[str]:
        if record == before:
            return _NOBODY
        if record.state is InstanceState.GONE:
            self._remove(record.sid)
            return frozenset({record.sid})
        packed = _bounded(record)
        if record.state is not before.state:
            held.note(f"{record.state}: {record.reason}" if record.reason else str(record.state))
        self._index.remove(record.sid, held.group)
        held.group = self._index.add(record.sid, record)
        held.packed = packed
        held.state = record.state
        held.memory_bytes = record.capability.memory_bytes
        held.flops_per_s = record.capability.flops_per_s
        return frozenset({record.sid})

    def _remove(self, sid: str) -> None:
        held = self._drop(sid)
        self._routes.release(held.route_id)
        if held.group.content.kind is EntityKind.INSTANCE:
            # A late duplicate of its registration must not bring it back.
            self._fences[sid] = (*held.replaced, held.incarnation)[-_FENCES_PER_SID:]
            while len(self._fences) > self.config.remembered_sids:
                self._fences.popitem(last=False)

    def _fenced(self, sid: str) -> tuple[str, ...]:
        held = self._held.get(sid)
        return held.replaced if held else self._fences.get(sid, ())

    def _fence_error(self, sid: str, incarnation: str) -> Fenced:
        held = self._held.get(sid)
        now_held = f"replaced by {held.incarnation}" if held else "gone"
        return Fenced(
            f"{sid}: incarnation {incarnation} is {now_held}; it may neither renew nor overwrite",
            sid=sid,
            incarnation=incarnation,
        )

    def _check_transition(self, sid: str, held: LeasedRecord, state: InstanceState, reason: str) -> None:
        if state in INSTANCE_TRANSITIONS[held.state]:
            return
        history = " → ".join(held.history)
        raise IllegalTransition(
            f"{sid}: {held.state} → {state} ({reason or 'no reason given'}) is not allowed; "
            f"history: {history}",
            sid=sid,
            incarnation=held.incarnation,
            history=history,
        )


def _route_of(held: LeasedRecord) -> int:
    return held.route_id


def _bounded(record: ServiceRecord) -> Packed[ServiceRecord]:
    packed = pack(record)
    if len(packed.body) > MOST_RECORD_BYTES:
        raise BadMessage(
            f"{record.sid}: a record of {len(packed.body):,} bytes; the registry takes {MOST_RECORD_BYTES:,}",
            reason="oversized",
            sid=record.sid,
        )
    return packed
