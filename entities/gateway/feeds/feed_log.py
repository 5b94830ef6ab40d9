"""The rows of feeds as gateways write them: a push creates the next row of its feed, or finds itself there.

A row is written with the expectation that its key was never written (ADR-0064). So of two gateways that push
at once one wins, and the other reads the winner's row and takes the next number. Whoever creates row n has
read all rows before it: a push that was stored before, by whichever gateway, is found by its token.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bus import subjects
from bus.connection import Bus
from bus.files.feed_rows import find_feed, last_row
from bus.logs import get_logger
from bus.messaging.key_value import Writing
from entities.gateway.feeds.feed_records import ReadPiece
from schemas.errors import (
    Conflict,
    DmscError,
    LastingConflict,
    NotFound,
    Unavailable,
    UnreadableRecord,
)
from schemas.feeds import MOST_SEGMENTS, Feed, FeedField, FeedPieceData, FeedRecord, FeedSegment

log = get_logger("gateway")

KNOWN = 16
"""Feeds whose rows one gateway remembers."""
TOGETHER = 64
"""Deletions under way at once."""


@dataclass(frozen=True, slots=True)
class StoredPush:
    """A push as it was stored: its number in the feed, its first record's index, and how many it has."""

    number: int
    first: int
    records: int


@dataclass(slots=True)
class _KnownRows:
    """What a gateway knows of a feed's rows: all up to one of them."""

    feed: FeedRecord
    last: FeedSegment | None = None
    pushes: dict[str, StoredPush] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def count(self) -> int:
        return 0 if self.last is None else self.last.number + 1

    def take(self, row: FeedSegment) -> None:
        self.last = row
        self.pushes[row.push] = StoredPush(row.number, row.first, row.records)


class FeedLog:
    """The feeds of the mesh, as one gateway writes them.

    Args:
        bus: The connection.
        removed_s: For so long the last row of a removed feed keeps gateways from writing rows of it.
        push_s: For so long a push is tried while the bus does not answer.
        again_s: Pause before it is tried again.
    """

    def __init__(
        self, bus: Bus, *, removed_s: float = 86_400.0, push_s: float = 15.0, again_s: float = 0.2
    ) -> None:
        self._removed_s = removed_s
        self._push_s = push_s
        self._again_s = again_s
        self._feeds = bus.bucket(subjects.FEED)
        self._rows = bus.bucket(subjects.FEED_SEGMENT)
        self._pieces = bus.bucket(subjects.FEED_PIECE)
        self._bus = bus
        self._known: OrderedDict[str, _KnownRows] = OrderedDict()

    # --- feeds ----------------------------------------------------------------------------------------------
    async def create(self, name: str, user: str, fields: Mapping[str, FeedField]) -> FeedRecord:
        """Creates a feed; one of the same user with the same fields is taken as it is.

        Raises:
            LastingConflict: Another feed has the name.
            UnreadableRecord: One has it whose record can't be read; an operator may delete it.
        """
        await self._feeds.get(leader=True, feed=name)  # `create` would take an unreadable one for none
        record = FeedRecord(
            name=name, uid=secrets.token_hex(8), user=user, fields=dict(fields), created_at=time.time()
        )
        try:
            await self._feeds.create(record, feed=name)
        except Conflict:
            there = await find_feed(self._bus, name)
            if (there.user, there.fields) != (user, record.fields):
                have = ", ".join(f"{key}: {value}" for key, value in there.fields.items())
                raise LastingConflict(
                    f"there is a feed {name} of {there.user} already, with {have}; take another name"
                ) from None
            return there
        return record

    async def find(self, name: str) -> FeedRecord:
        """Raises `NotFound`."""
        return await find_feed(self._bus, name)

    async def all(self) -> list[FeedRecord]:
        entries = await self._feeds.entries()
        return [entry.message for entry in entries if isinstance(entry.message, FeedRecord)]

    async def view(self, record: FeedRecord) -> Feed:
        """The feed as it is now; of a damaged one, as far as its rows can be read.

        Raises:
            NotFound: It was removed.
        """
        try:
            last = await last_row(self._bus, record.name, record.uid)
        except UnreadableRecord:
            last = max(await self._readable_rows(record), key=lambda row: row.number, default=None)
        if last is not None and last.end == "removed":
            raise _gone(record.name)
        closed = last is not None and last.end == "closed"
        return Feed(
            name=record.name,
            user=record.user,
            fields=record.fields,
            records=0 if last is None else last.after,
            pushes=0 if last is None else last.number + 1 - closed,
            stored_bytes=0 if last is None else last.stored_bytes,
            closed=closed,
            created_at=record.created_at,
            changed_at=record.created_at if last is None else last.at,
        )

    async def views(self, records: Iterable[FeedRecord]) -> list[Feed]:
        """The feeds that are there, as they are now."""
        found = await asyncio.gather(*(self.view(record) for record in records), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, NotFound):
                raise each
        return [each for each in found if isinstance(each, Feed)]

    # --- rows -----------------------------------------------------------------------------------------------
    async def append(self, record: FeedRecord, pieces: Sequence[ReadPiece], push: str) -> StoredPush:
        """Stores a push, or finds it stored.

        Args:
            push: What the push is recognised by.

        Raises:
            LastingConflict: The feed is closed, or has as many pushes as it may.
            NotFound: It was removed.
            Unavailable: The bus does not answer; whether it is stored, a repetition finds out.
        """
        deadline = time.monotonic() + self._push_s
        while True:
            try:
                return await self._append(record, pieces, push)
            except Unavailable:  # what was stored without an answer is found
                if time.monotonic() + self._again_s > deadline:
                    raise
            await asyncio.sleep(self._again_s)

    async def _append(self, record: FeedRecord, pieces: Sequence[ReadPiece], push: str) -> StoredPush:
        known = await self._rows_of(record)
        described = tuple(piece.described() for piece in pieces)
        if push not in known.pushes:
            for piece, about in zip(pieces, described, strict=True):
                message = FeedPieceData(data=piece.data)
                await self._pieces.put(message, uid=record.uid, digest=about.digest)
        async with known.lock:
            while (stored := known.pushes.get(push)) is None:
                self._check_open(known)
                if known.count >= MOST_SEGMENTS:
                    raise LastingConflict(
                        f"feed {record.name} has {known.count:,} pushes, the most that a feed may: create "
                        "another one, and push more records at a time"
                    )
                last = known.last
                row = FeedSegment(
                    uid=record.uid,
                    number=known.count,
                    first=0 if last is None else last.after,
                    pieces=described,
                    stored_bytes=sum(about.size_bytes for about in described)
                    + (0 if last is None else last.stored_bytes),
                    push=push,
                    at=time.time(),
                )
                await self._write(known, row)
        return stored

    async def end(self, record: FeedRecord, how: Literal["closed", "removed"]) -> None:
        """Writes the last row. Closing a closed feed changes nothing.

        Raises:
            NotFound: It was removed.
        """
        known = await self._rows_of(record)
        async with known.lock:
            while True:
                await self._catch_up(known)
                last = known.last
                if last is not None and last.end == "removed":
                    raise _gone(record.name)
                if last is not None and last.end == how:
                    return
                row = FeedSegment(
                    uid=record.uid,
                    number=known.count,
                    first=0 if last is None else last.after,
                    stored_bytes=0 if last is None else last.stored_bytes,
                    push=secrets.token_hex(24),
                    at=time.time(),
                    end=how,
                )
                if await self._write(known, row):
                    return

    async def remove(self, record: FeedRecord) -> None:
        """Removes a feed with all its records. What is left by a failure, a repetition removes."""
        try:
            await self.end(record, "removed")
        except NotFound:
            log.info("feed removed before", feed=record.name)
        except Conflict as damage:  # then nobody can write a row of it
            log.info("damaged feed removed", feed=record.name, damage=damage.text)
        digests = [key.rpartition(".")[2] for key in await self._pieces.keys(uid=record.uid)]
        for start in range(0, len(digests), TOGETHER):
            together = digests[start : start + TOGETHER]
            await asyncio.gather(*(self._pieces.delete(uid=record.uid, digest=each) for each in together))
        entries = await self._rows.entries(uid=record.uid)
        rows = [(entry, entry.message) for entry in entries if isinstance(entry.message, FeedSegment)]
        gone = [
            Writing({"uid": record.uid, "number": row.number}, None, entry.revision)
            for entry, row in rows
            if row.end != "removed"
        ]
        for outcome in await self._rows.write_many(gone):
            if isinstance(outcome, DmscError):
                raise outcome
        for entry, row in rows:
            if row.end == "removed":
                await self._rows.update(
                    row, revision=entry.revision, ttl_s=self._removed_s, uid=record.uid, number=row.number
                )
        readable = {row.number for _, row in rows}
        for key in await self._rows.keys(uid=record.uid):
            if (number := int(key.rpartition(".")[2])) not in readable:
                await self._rows.delete(uid=record.uid, number=number)
        await self.forget(record.name)
        self._known.pop(record.uid, None)

    async def forget(self, name: str) -> None:
        """Removes a feed's own record only. Its records stay on the bus if nobody can tell which they are."""
        await self._feeds.delete(feed=name)

    # --- what this gateway knows ----------------------------------------------------------------------------
    async def _rows_of(self, record: FeedRecord) -> _KnownRows:
        known = self._known.get(record.uid)
        if known is None:
            found = _KnownRows(record)
            for row in sorted(await self._readable_rows(record), key=lambda row: row.number):
                if row.number != found.count and row.end != "removed":
                    raise _damaged(record.name, found.count)
                found.take(row)
            known = self._known.setdefault(record.uid, found)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(record.uid)
        return known

    async def _readable_rows(self, record: FeedRecord) -> list[FeedSegment]:
        entries = await self._rows.entries(uid=record.uid)
        return [entry.message for entry in entries if isinstance(entry.message, FeedSegment)]

    async def _write(self, known: _KnownRows, row: FeedSegment) -> bool:
        """Writes the next row; where another gateway did, reads what it wrote."""
        try:
            # Not `create`, which takes an unreadable value for none: a row is never written over.
            await self._rows.update(row, revision=0, uid=row.uid, number=row.number)
        except Conflict:
            before = known.count
            await self._catch_up(known)
            if known.count == before:
                raise _gone(known.feed.name) from None  # the row was there, and was removed with its feed
            return False
        known.take(row)
        return True

    async def _catch_up(self, known: _KnownRows) -> None:
        while known.count <= MOST_SEGMENTS + 1:
            try:
                entry = await self._rows.get(leader=True, uid=known.feed.uid, number=known.count)
            except UnreadableRecord:
                raise _damaged(known.feed.name, known.count) from None
            if entry is None or not isinstance(entry.message, FeedSegment):
                return
            known.take(entry.message)

    def _check_open(self, known: _KnownRows) -> None:
        last, name = known.last, known.feed.name
        if last is not None and last.end == "removed":
            raise _gone(name)
        if last is not None and last.end == "closed":
            raise LastingConflict(f"feed {name} is closed: it takes no more records; create another one")


def _damaged(name: str, number: int) -> LastingConflict:
    return LastingConflict(
        f"feed {name} is damaged: the row of push {number} can't be read; create another feed, and have an "
        "operator delete this one"
    )


def _gone(name: str) -> NotFound:
    return NotFound(f"there is no feed {name} any more: it was deleted")
