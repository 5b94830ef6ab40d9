"""The registry's decisions, without I/O and without a clock (draft §3 SRD, §4.5(2–3)).

`RegistryCore` holds the records and answers every event with the SIDs whose record changed; the shell
(`service_registry.py`) writes those to the bucket and advertises them. Times come in as arguments
(seconds of one monotonic clock).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.envelope import EntityKind
from schemas.errors import Fenced, IllegalTransition, NotFound
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
_HISTORY = 32
_OVER = (InstanceState.FAULTED, InstanceState.GONE)


@dataclass(frozen=True, kw_only=True)
class LeaseConfig:
    """How long a registration lives without a sign of life."""

    heartbeat_s: float = 1.0  # asked of each holder; smaller finds deaths sooner, costs messages
    expiry_s: float = 6.0  # silence after which a record counts as lost; ≥ 3 heartbeats, as beats may be lost
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


class RouteIds:
    """Allocates the lowest free route id, from 1 (draft §4.4(1): routing identifiers)."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._free: list[int] = []
        self._next = 1

    def take(self, wanted: int = 0) -> int:
        """`wanted` if it is free and above 0, else the lowest free one."""
        if wanted > 0 and wanted not in self._used:
            while self._next <= wanted:
                heapq.heappush(self._free, self._next)
                self._next += 1
            self._used.add(wanted)
            return wanted
        while self._free:
            lowest = heapq.heappop(self._free)
            if lowest not in self._used:
                self._used.add(lowest)
                return lowest
        number = self._next
        self._next += 1
        self._used.add(number)
        return number

    def release(self, number: int) -> None:
        if number in self._used:
            self._used.remove(number)
            heapq.heappush(self._free, number)


@dataclass(slots=True)
class Held:
    """A record with its lease: when it was last heard of, and what became of it."""

    record: ServiceRecord
    heard: float
    history: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY))


class RegistryCore:
    """All records. Every event returns the SIDs whose record was changed or removed.

    One rule decides about incarnations: one that was never seen for its SID replaces the present one and
    fences it for good; a fenced one can neither renew nor overwrite (`Fenced`).
    """

    def __init__(self, config: LeaseConfig) -> None:
        self.config = config
        self._held: dict[str, Held] = {}
        self._routes = RouteIds()
        self._fences: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._last_tick: float | None = None
        self.stale_beats = 0

    # --- reading -------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._held)

    def record(self, sid: str) -> ServiceRecord | None:
        held = self._held.get(sid)
        return held.record if held else None

    def records(self) -> tuple[ServiceRecord, ...]:
        """All records in order of route id."""
        return tuple(
            sorted((held.record for held in self._held.values()), key=lambda record: record.route_id)
        )

    def resolve(self, query: Resolve) -> tuple[ServiceRecord, ...]:
        """Discovery by content (draft §1): every given filter must match; in order of route id."""
        if query.sid is not None:
            held = self._held.get(query.sid)
            return (held.record,) if held and matches(query, held.record) else ()
        return tuple(record for record in self.records() if matches(query, record))

    # --- events ----------------------------------------------------------------------------------------
    def load(self, records: Iterable[ServiceRecord], now: float) -> frozenset[str]:
        """Take over what the bucket holds after a restart; everyone gets a whole lease from `now`."""
        touched: set[str] = set()
        for record in sorted(records, key=lambda record: record.route_id):
            route_id = self._routes.take(record.route_id)
            if route_id != record.route_id:
                record = record.model_copy(update={"route_id": route_id})
                touched.add(record.sid)
            self._held[record.sid] = held = Held(record, now)
            held.history.append(f"{record.state}: loaded")
        return frozenset(touched)

    def register(self, record: ServiceRecord, now: float) -> frozenset[str]:
        """Type 1. New, a new incarnation, an update, or a renewal (which changes nothing)."""
        held = self._held.get(record.sid)
        if record.incarnation in self._fenced(record.sid):
            raise self._fence_error(record.sid, record.incarnation)
        if held is None or held.record.incarnation != record.incarnation:
            return self._admit(record, held, now)
        if record.state is not held.record.state:
            self._check_transition(held, record.state, record.reason)
        held.heard = now
        kept: dict[str, object] = {"route_id": held.record.route_id, "replaced": held.record.replaced}
        if record.state is held.record.state and not record.reason:
            kept |= {
                "reason": held.record.reason,
                "fault": held.record.fault,
                "culprit": held.record.culprit,
            }
        return self._store(held, record.model_copy(update=kept))

    def heartbeat(self, beat: Heartbeat, now: float) -> frozenset[str]:
        """A sign of life. It carries the state, so that a lost `StateChange` is made good."""
        held = self._held.get(beat.sid)
        if held is None or held.record.incarnation != beat.incarnation:
            self.stale_beats += 1
            return frozenset()
        held.heard = now
        if beat.state in INSTANCE_TRANSITIONS[held.record.state]:
            return self._move(held, beat.state, _BY_HEARTBEAT)
        return frozenset()

    def change(self, change: StateChange, now: float) -> frozenset[str]:
        """A state moved, as told by the incarnation itself or by its node agent."""
        held = self._held.get(change.sid)
        if change.incarnation in self._fenced(change.sid):
            raise self._fence_error(change.sid, change.incarnation)
        if held is None or held.record.incarnation != change.incarnation:
            raise NotFound(
                f"{change.sid}: incarnation {change.incarnation} is not registered; register it first",
                sid=change.sid,
                incarnation=change.incarnation,
            )
        if change.state is held.record.state:
            faster = held.record.reason == _BY_HEARTBEAT  # the heartbeat was faster: here is why
            if not faster and (change.state in _OVER or not change.reason):
                return frozenset()  # a repetition; of how it ended the first word counts
            return self._move(held, change.state, change.reason, change.fault, change.culprit)
        self._check_transition(held, change.state, change.reason)
        return self._move(held, change.state, change.reason, change.fault, change.culprit)

    def release(self, job: str) -> frozenset[str]:
        """Draft §4.4(6): forget the job's records and release their route ids."""
        sids = [sid for sid, held in self._held.items() if held.record.job == job]
        for sid in sids:
            self._remove(sid)
        return frozenset(sids)

    def tick(self, now: float) -> frozenset[str]:
        """Look for silence. Time in which we ourselves did not run counts for nobody."""
        last, self._last_tick = self._last_tick, now
        if last is not None:
            lag = now - last - self.config.tick_s
            if lag > self.config.heartbeat_s:
                self.forgive(lag, now)
        touched: set[str] = set()
        for held in list(self._held.values()):
            silent = now - held.heard
            if silent > self.config.expiry_s:
                touched |= self._expire(held, silent)
        return frozenset(touched)

    def forgive(self, lag: float, now: float) -> None:
        """Extend every lease by `lag` seconds, and to two heartbeats at least: theirs wait in our socket."""
        least = now - self.config.expiry_s + 2 * self.config.heartbeat_s
        for held in self._held.values():
            held.heard = min(now, max(held.heard + lag, least))

    # --- inside ------------------------------------------------------------------------------------------
    def _admit(self, record: ServiceRecord, before: Held | None, now: float) -> frozenset[str]:
        if record.state is InstanceState.GONE:
            return frozenset()
        fenced = self._fenced(record.sid)
        if before is not None:
            fenced = (*fenced, before.record.incarnation)
            route_id = before.record.route_id
        else:
            route_id = self._routes.take(record.route_id)
        self._fences.pop(record.sid, None)
        held = Held(
            record.model_copy(update={"route_id": route_id, "replaced": fenced[-_FENCES_PER_SID:]}), now
        )
        if before is not None:
            held.history.append(f"incarnation {before.record.incarnation} was {before.record.state}")
        held.history.append(f"{record.state}: registered as {record.incarnation}")
        self._held[record.sid] = held
        return frozenset({record.sid})

    def _expire(self, held: Held, silent: float) -> frozenset[str]:
        record = held.record
        if record.kind is not EntityKind.INSTANCE:
            # A service may come back with the same incarnation (a broken network): no fence, no fault.
            self._routes.release(record.route_id)
            del self._held[record.sid]
            return frozenset({record.sid})
        if record.state is InstanceState.FAULTED:
            return frozenset()
        return self._move(held, InstanceState.FAULTED, f"{SILENT} for {silent:.1f} s")

    def _move(
        self,
        held: Held,
        state: InstanceState,
        reason: str,
        fault: str = "",
        culprit: Culprit | None = None,
    ) -> frozenset[str]:
        if state is InstanceState.GONE:
            held.history.append(f"{state}: {reason}")
            self._remove(held.record.sid)
            return frozenset({held.record.sid})
        moved = {"state": state, "reason": reason, "fault": fault, "culprit": culprit}
        return self._store(held, held.record.model_copy(update=moved))

    def _store(self, held: Held, record: ServiceRecord) -> frozenset[str]:
        if record == held.record:
            return frozenset()
        if record.state is not held.record.state:
            held.history.append(f"{record.state}: {record.reason}" if record.reason else str(record.state))
        if record.state is InstanceState.GONE:
            self._remove(record.sid)
        else:
            held.record = record
        return frozenset({record.sid})

    def _remove(self, sid: str) -> None:
        record = self._held.pop(sid).record
        self._routes.release(record.route_id)
        if record.kind is EntityKind.INSTANCE:
            # A late duplicate of its registration must not bring it back.
            self._fences[sid] = (*record.replaced, record.incarnation)[-_FENCES_PER_SID:]
            while len(self._fences) > self.config.remembered_sids:
                self._fences.popitem(last=False)

    def _fenced(self, sid: str) -> tuple[str, ...]:
        held = self._held.get(sid)
        return held.record.replaced if held else self._fences.get(sid, ())

    def _fence_error(self, sid: str, incarnation: str) -> Fenced:
        held = self._held.get(sid)
        now_held = f"replaced by {held.record.incarnation}" if held else "gone"
        return Fenced(
            f"{sid}: incarnation {incarnation} is {now_held}; it may neither renew nor overwrite",
            sid=sid,
            incarnation=incarnation,
        )

    def _check_transition(self, held: Held, state: InstanceState, reason: str) -> None:
        record = held.record
        if state in INSTANCE_TRANSITIONS[record.state]:
            return
        history = " → ".join(held.history)
        raise IllegalTransition(
            f"{record.sid}: {record.state} → {state} ({reason or 'no reason given'}) is not allowed; "
            f"history: {history}",
            sid=record.sid,
            incarnation=record.incarnation,
            history=history,
        )


def matches(query: Resolve, record: ServiceRecord) -> bool:
    """Whether a record has all the content that the query asks for."""
    if query.prefix is not None:
        prefix = query.prefix.rstrip("/")
        if record.prefix != prefix and not record.prefix.startswith(prefix + "/"):
            return False
    return (
        (query.sid is None or record.sid == query.sid)
        and (query.kind is None or record.kind is query.kind)
        and (query.job is None or record.job == query.job)
        and (query.stage is None or record.stage == query.stage)
        and (query.cluster is None or record.endpoint.cluster == query.cluster)
        and (query.state is None or record.state is query.state)
        and set(query.tags) <= set(record.tags)
        and (query.input_schema is None or record.input_schema == query.input_schema)
        and (query.output_schema is None or record.output_schema == query.output_schema)
    )
