"""How charges get into slices, once each: all that the accountant reads from and writes to the bus.

A batch of messages is written in this order: the slices that it touches, how far nodes and jobs are counted,
and at last the position in the stream. Each of these values has the position up to which it is complete. So
after a kill in between the messages are read again, and what has them already leaves them out. Every write is
a compare-and-set: of two accountants that take the same batch one is refused, and reads all anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Bucket, Writing
from bus.messaging.streams import StreamRecord
from bus.subject_row import Subject
from entities.accountant.ledger import Charge, JobClaims, RowKey, take_report
from entities.accountant.payers import Payer
from entities.accountant.service_use import take_use
from schemas.accounts import (
    AMOUNTS,
    SLICES_KEPT_S,
    AccountPosition,
    AccountRow,
    AccountSlice,
    CountedNode,
    CountedUses,
    SlotReport,
    UseReport,
)
from schemas.errors import DmscError
from schemas.step import MicrobatchClaim

log = get_logger("accountant")

READ_AT_ONCE = 32
MOST_JOBS = 512
"""Whose claims are known in memory; of others they are read again."""
MOST_SLICES = 64
BOOK = ("book", "mesh")

PayerOf = Callable[[RowKey], Payer]
"""Whose a row is."""


@dataclass(slots=True)
class _Cursor:
    """How far a node, a job or a gateway is counted, with the revision that its next write must name."""

    revision: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    node: CountedNode | None = None
    claims: JobClaims | None = None
    uses: CountedUses | None = None

    def message(self) -> AccountPosition:
        work = None if self.claims is None else self.claims.counted()
        return AccountPosition(positions=self.positions, node=self.node, work=work, uses=self.uses)


@dataclass(slots=True)
class _OpenSlice:
    revision: int
    rows: dict[RowKey, AccountRow]
    positions: dict[str, int]

    def message(self, start: int) -> AccountSlice:
        return AccountSlice(start=start, rows=tuple(self.rows.values()), positions=self.positions)


class AccountBook:
    """The slices and positions of the accounts.

    Args:
        bus: the bus.
        payer_of: whose a row is.
        clock: seconds since the epoch.
    """

    def __init__(self, bus: Bus, payer_of: PayerOf, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._payer_of = payer_of
        self._clock = clock
        self._slice_bucket: Bucket = bus.bucket(subjects.ACCOUNT_SLICE)
        self._bucket: Bucket = bus.bucket(subjects.ACCOUNT_POSITION)
        self._book: _Cursor | None = None
        self._cursors: dict[tuple[str, str], _Cursor] = {}
        self._slices: dict[int, _OpenSlice] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self.changed: dict[int, AccountSlice] = {}
        """Slices that were written since somebody last emptied this."""
        self.added: dict[str, float] = dict.fromkeys((*AMOUNTS, "idle_s"), 0.0)
        """What was added to all slices since this process began."""

    def forget(self) -> None:
        """Somebody else writes, or a write failed: all is read anew."""
        self._book = None
        self._cursors.clear()
        self._slices.clear()

    async def position(self, name: str) -> int:
        """How far a stream is counted."""
        if self._book is None:
            self._book = await self._load(*BOOK)
            for key, cursor in (await self._all_of("node")).items():
                self._cursors["node", key] = cursor
                self._find_places(cursor.node)
        return self._book.positions.get(name, 0)

    async def base(self, row: Subject, name: str) -> int:
        """What is added to the stream's sequences, which begin anew if the stream was made anew."""
        position, base = await self.position(name), await self.position(f"{name}.base")
        assert self._book is not None
        if base + await self._bus.last_sequence(row) < position:
            log.warning("a stream was made anew: what it held and was not counted is lost", stream=row.stream)
            base = self._book.positions[f"{name}.base"] = position
        return base

    # --- batches -------------------------------------------------------------------------------------------
    async def take_reports(self, records: Sequence[StreamRecord], base: int) -> None:
        """Counts reports of nodes, in their order. Raises `DmscError`; then call `forget` and read anew."""
        charged: list[tuple[int, Charge]] = []
        touched: set[tuple[str, str]] = set()
        now = self._clock()
        for record in records:
            report, sequence = record.message, base + record.sequence
            assert isinstance(report, SlotReport)
            key = ("node", record.envelope.sender.name)
            cursor = await self._cursor(*key)
            if sequence <= cursor.positions.get("slots", 0):
                continue
            taken = take_report(cursor.node or CountedNode(), report, now)
            if taken.refused:
                log.warning("report not counted", node=report.node, reason=taken.refused)
            cursor.node = taken.node
            cursor.positions["slots"] = sequence
            touched.add(key)
            self._find_places(taken.node)
            charged += ((sequence, charge) for charge in taken.charges)
        if records:
            await self._commit("slots", base + records[-1].sequence, charged, touched)

    async def take_claims(self, records: Sequence[StreamRecord], base: int) -> None:
        """Counts claims of instances, in their order. Raises `DmscError`, as `take_reports` does."""
        charged: list[tuple[int, Charge]] = []
        touched: set[tuple[str, str]] = set()
        now = self._clock()
        for record in records:
            claim, sequence = record.message, base + record.sequence
            assert isinstance(claim, MicrobatchClaim)
            key = ("job", claim.job)
            cursor = await self._cursor(*key)
            if sequence <= cursor.positions.get("claims", 0):
                continue
            if cursor.claims is None:
                cursor.claims = JobClaims()
            place = self._places.get(claim.owner.incarnation, ("", ""))
            charge = cursor.claims.take(claim, record.envelope.sent_at, place, now)
            cursor.positions["claims"] = sequence
            touched.add(key)
            if charge is not None:
                charged.append((sequence, charge))
        if records:
            await self._commit("claims", base + records[-1].sequence, charged, touched)

    async def take_uses(self, records: Sequence[StreamRecord], base: int) -> None:
        """Counts reports of gateways, in their order. Raises `DmscError`, as `take_reports` does."""
        charged: list[tuple[int, Charge]] = []
        touched: set[tuple[str, str]] = set()
        now = self._clock()
        for record in records:
            report, sequence = record.message, base + record.sequence
            assert isinstance(report, UseReport)
            key = ("gateway", report.gateway)
            cursor = await self._cursor(*key)
            if sequence <= cursor.positions.get("uses", 0):
                continue
            taken = take_use(cursor.uses or CountedUses(), report, now)
            if taken.refused:
                log.warning("report not counted", gateway=report.gateway, reason=taken.refused)
            cursor.uses = taken.uses
            cursor.positions["uses"] = sequence
            touched.add(key)
            charged += ((sequence, charge) for charge in taken.charges)
        if records:
            await self._commit("uses", base + records[-1].sequence, charged, touched)

    async def take_storage(self, charges: Iterable[Charge], at: int) -> None:
        """Counts what was stored up to `at`, whole seconds since the epoch."""
        await self._commit("storage", at, [(at, charge) for charge in charges], set())

    async def _commit(
        self,
        name: str,
        position: int,
        charged: Sequence[tuple[int, Charge]],
        touched: set[tuple[str, str]],
    ) -> None:
        await self.position(name)
        assert self._book is not None
        by_slice: dict[int, list[tuple[int, Charge]]] = {}
        for sequence, charge in charged:
            by_slice.setdefault(charge.start, []).append((sequence, charge))
        for start, its in sorted(by_slice.items()):
            await self._add(name, position, start, its)
        await self._write_cursors(touched)
        self._book.positions[name] = position
        self._book.revision = await self._bucket.update(
            self._book.message(), revision=self._book.revision, part=BOOK[0], name=BOOK[1]
        )
        self._trim()

    async def _add(self, name: str, position: int, start: int, charged: Iterable[tuple[int, Charge]]) -> None:
        slice_ = await self._slice(start)
        before = slice_.positions.get(name, 0)
        sums: dict[RowKey, dict[str, float]] = {}
        for sequence, charge in charged:
            if sequence <= before:
                continue
            own = sums.setdefault(charge.key, {})
            for amount, value in charge.amounts.items():
                own[amount] = own.get(amount, 0) + value
        for key, amounts in sums.items():
            row = slice_.rows.get(key) or AccountRow(**key._asdict())
            more: dict[str, Any] = {each: getattr(row, each) + value for each, value in amounts.items()}
            known = {name: whose for name, whose in self._payer_of(key)._asdict().items() if whose}
            slice_.rows[key] = row.model_copy(update=more | known)
        slice_.positions[name] = max(before, position)
        message = slice_.message(start)
        slice_.revision = await self._slice_bucket.update(
            message, revision=slice_.revision, ttl_s=SLICES_KEPT_S, start=start
        )
        self.changed[start] = message
        for key, amounts in sums.items():
            self._count(key, amounts)

    def _count(self, key: RowKey, amounts: Mapping[str, float]) -> None:
        for name, value in amounts.items():
            total = "idle_s" if key.payer_kind == "idle" and name == "held_s" else name
            self.added[total] += value

    async def _write_cursors(self, touched: Iterable[tuple[str, str]]) -> None:
        keys = list(touched)
        writings = [
            Writing(
                {"part": part, "name": name},
                self._cursors[part, name].message(),
                self._cursors[part, name].revision,
            )
            for part, name in keys
        ]
        for key, outcome in zip(keys, await self._bucket.write_many(writings), strict=True):
            if isinstance(outcome, DmscError):
                raise outcome
            self._cursors[key].revision = outcome

    # --- what is known -------------------------------------------------------------------------------------
    async def _load(self, part: str, name: str) -> _Cursor:
        entry = await self._bucket.get(leader=True, part=part, name=name)
        if entry is None:
            return _Cursor(revision=await self._bucket.revision(part=part, name=name))
        return _cursor_of(entry.revision, entry.message)

    async def _all_of(self, part: str) -> dict[str, _Cursor]:
        entries = await self._bucket.entries(part=part)
        return {entry.key.partition(".")[2]: _cursor_of(entry.revision, entry.message) for entry in entries}

    async def _cursor(self, part: str, name: str) -> _Cursor:
        cursor = self._cursors.get((part, name))
        if cursor is None:
            cursor = self._cursors[part, name] = await self._load(part, name)
        return cursor

    async def _slice(self, start: int) -> _OpenSlice:
        slice_ = self._slices.get(start)
        if slice_ is None:
            entry = await self._slice_bucket.get(leader=True, start=start)
            if entry is None:
                slice_ = _OpenSlice(await self._slice_bucket.revision(start=start), {}, {})
            else:
                message: AccountSlice = entry.message
                rows = {RowKey(row.payer_kind, row.payer, row.cluster, row.kind): row for row in message.rows}
                slice_ = _OpenSlice(entry.revision, rows, dict(message.positions))
            self._slices[start] = slice_
        return slice_

    def _find_places(self, node: CountedNode | None) -> None:
        if node is None:
            return
        for stretch in node.stretches.values():
            if stretch.incarnation:
                self._places[stretch.incarnation] = (node.cluster, stretch.kind)
        while len(self._places) > 100_000:
            del self._places[next(iter(self._places))]

    def _trim(self) -> None:
        """Keeps memory bounded: what is dropped is read again when it is needed."""
        jobs = [key for key in self._cursors if key[0] == "job"]
        for key in jobs[: max(0, len(jobs) - MOST_JOBS)]:
            del self._cursors[key]
        for start in sorted(self._slices)[: max(0, len(self._slices) - MOST_SLICES)]:
            del self._slices[start]

    async def storage_until(self, starts: Iterable[int]) -> int:
        """Up to when what is stored was counted, by the book and by these slices."""
        until = await self.position("storage")
        for start in starts:
            until = max(until, (await self._slice(start)).positions.get("storage", 0))
        return until

    async def slices(self, since: float, until: float) -> list[AccountSlice]:
        """The slices that begin from `since` on and before `until`, by their beginning."""
        starts = sorted(int(key) for key in await self._slice_bucket.keys() if key.isdigit())
        wanted = [start for start in starts if since <= start < until]
        found: list[AccountSlice] = []
        for first in range(0, len(wanted), READ_AT_ONCE):
            reads = (self._slice_bucket.get(start=start) for start in wanted[first : first + READ_AT_ONCE])
            found += [entry.message for entry in await asyncio.gather(*reads) if entry is not None]
        return found

    async def drop_jobs(self, jobs: Iterable[str]) -> None:
        """These have ended, and their claims are counted: how far that was is not needed any more."""
        present = {key.partition(".")[2] for key in await self._bucket.keys(part="job")}
        for job in present.intersection(jobs):
            self._cursors.pop(("job", job), None)
            await self._bucket.delete(part="job", name=job)


def _cursor_of(revision: int, message: AccountPosition) -> _Cursor:
    claims = None if message.work is None else JobClaims.of(message.work)
    return _Cursor(revision, dict(message.positions), message.node, claims, message.uses)
