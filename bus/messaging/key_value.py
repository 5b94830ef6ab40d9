"""Typed key-value buckets, with correct behaviour after expiries and interruptions.

nats-py's own `get()` returns an empty entry after an expiry, and its `create()` then fails. Its watchers
stall after a server restart and never learn of an expiry that happened meanwhile. Here a marker of any kind
means absence, a create over a marker names the marker's revision, and a watch that was interrupted compares
the present entries with those that it knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bus.logs import get_logger
from bus.messaging.dead_letters import dead_letter
from bus.messaging.port import BusPort
from bus.messaging.stream_specs import KEEPS_PREVIOUS, deletion_headers
from bus.messaging.unreadable_values import judged, quarantine
from bus.nats import jetstream
from bus.nats.client import asked_to_end
from bus.nats.jetstream import EXPECTED
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject_row import Subject
from bus.tasks import cancel
from bus.wire import codec
from bus.wire.packed import Sendable
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import (
    BadMessage,
    BusUnreachable,
    Conflict,
    DeadlineExceeded,
    DmscError,
    NewerRecord,
    NotFound,
    Unavailable,
    UnreadableRecord,
)

log = get_logger("bus.messaging.key_value")

BATCH_LEAST = 4
"""The smallest number of values for which a batch is worth its round trip."""
CREATE_ATTEMPTS = 5
"""Attempts of a create: another writer may replace the marker meanwhile; after this many it is a conflict."""


@dataclass(frozen=True, slots=True)
class KeyValueEntry:
    """A key's present value."""

    key: str
    revision: int
    message: Any
    envelope: Envelope
    stale: bool = False
    """The newest value, at `revision`, can't be read; `message` is the last readable value before it."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One of many writes: `message` None deletes; `revision` is what the key must have, 0 if it is absent."""

    tokens: dict[str, Any]
    message: Sendable | None
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """What a watch saw: a value, or `message=None` for deleted or expired. Key "" means "now current"."""

    key: str
    revision: int
    message: Any = None


WatchHandler = Callable[[Change], Awaitable[None]]
Mend = Callable[[str, int], Awaitable[None]]
"""Called with the key and the revision of a value that can't be read."""


class Watch:
    """A running watch; `stop()` ends it and is idempotent."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    async def stop(self, drain: bool = True) -> None:
        task, self.task = self.task, None
        if task is asyncio.current_task() and task is not None:
            task.cancel()  # a handler stops its own watch, and can't wait for itself
        else:
            await cancel(task)


class Bucket:
    """The bucket of one row of the table of subjects; keys are made of the row's tokens.

    Every call raises `BusUnreachable` at once when there is no connection or it breaks, and
    `DeadlineExceeded` when the bus does not answer in time. After either, a write may or may not have
    happened: read again with `get(leader=True)`.
    """

    def __init__(self, bus: BusPort, row: Subject) -> None:
        if row.bucket is None:
            raise NotFound(f"subject {row.name} has no bucket", subject=row.name)
        self.row = row
        self._bus = bus
        self._stream = f"KV_{row.bucket}"
        self._call_s = bus.times.bucket_call_s
        self._deletion = deletion_headers(row.bucket)

    # --- writing -------------------------------------------------------------------------------------------

    async def put(self, message: Sendable, *, ttl_s: float | None = None, **tokens: Any) -> int:
        """Writes the value unconditionally; returns the revision.

        `ttl_s` is rounded up to whole seconds, at least one, because the server has no finer unit.
        """
        return await self._write(message, None, ttl_s, tokens)

    async def create(self, message: Message, *, ttl_s: float | None = None, **tokens: Any) -> int:
        """Writes only if the key is absent (never written, deleted, or expired); returns the revision.
        An unreadable value counts as absent, unless its bucket keeps an earlier one that stands for it.

        Raises:
            Conflict: the key exists.
        """
        expected = 0
        for _ in range(CREATE_ATTEMPTS):
            try:
                return await self._write(message, expected, ttl_s, tokens)
            except Conflict:
                # Through the leader: a replica may not have the marker yet.
                last = await self._last(tokens, leader=True)
                if last is not None and not last.is_marker and not await self._is_unreadable(last):
                    raise Conflict(f"{self.row.name} {self.row.key(**tokens)} exists already") from None
                expected = 0 if last is None else last.sequence
        raise Conflict(f"{self.row.name} {self.row.key(**tokens)}: others write it at the same time")

    async def update(
        self, message: Message, *, revision: int, ttl_s: float | None = None, **tokens: Any
    ) -> int:
        """Compare-and-set: writes only if the key still has `revision`; returns the new one.

        Raises:
            Conflict: the key has another revision.
            DeadlineExceeded, BusUnreachable: unknown whether it was written; read again through the leader.
        """
        return await self._write(message, revision, ttl_s, tokens)

    async def delete(self, *, revision: int | None = None, **tokens: Any) -> None:
        """Removes the key; with `revision`, only if it still has that one.

        Raises:
            Conflict: the key has another revision than `revision`.
        """
        headers = self._deletion if revision is None else self._deletion | {EXPECTED: str(revision)}
        subject = self.row(**tokens)
        await jetstream.publish(self._bus.connection, subject, b"", headers, timeout_s=self._call_s)

    async def write_many(self, writings: Sequence[Writing]) -> list[int | DmscError]:
        """Compare-and-set of many different keys; returns each key's revision or error (see `update`).

        Values go in batches, each of which the server takes as a whole and syncs once. If it refuses a batch,
        because a key has another revision, its values go one after the other, as deletions always do.
        """
        outcome_of: dict[int, int | DmscError] = {}
        values = [place for place, writing in enumerate(writings) if writing.message is not None]
        for start in range(0, len(values), jetstream.BATCH_MOST):
            places = values[start : start + jetstream.BATCH_MOST]
            if len(places) < BATCH_LEAST:
                continue
            batch = [self._publication(writings[place]) for place in places]
            try:
                revisions = await jetstream.publish_batch(
                    self._bus.connection,
                    self._bus.next_id(),
                    batch,
                    timeout_s=self._call_s + len(batch) * self._bus.times.batch_each_s,
                )
                outcome_of.update(zip(places, revisions, strict=True))
            except (BusUnreachable, DeadlineExceeded) as error:
                outcome_of.update((place, error) for place in places)
            except DmscError as error:
                log.debug("batch not taken", bucket=self.row.bucket, error=error.text)
        remaining = [place for place in range(len(writings)) if place not in outcome_of]
        singly = [self._publication(writings[place]) for place in remaining]
        outcomes = await jetstream.publish_many(self._bus.connection, singly, timeout_s=self._call_s)
        outcome_of.update(zip(remaining, outcomes, strict=True))
        return [outcome_of[place] for place in range(len(writings))]

    def _publication(self, writing: Writing) -> tuple[str, bytes, dict[str, str]]:
        headers = {EXPECTED: str(writing.revision)}
        subject = self.row(**writing.tokens)
        if writing.message is None:
            return subject, b"", headers | self._deletion
        return subject, codec.encode(writing.message, self._bus.sender_map, self._bus.next_id()), headers

    async def revision(self, **tokens: Any) -> int:
        """The revision that an `update` must name, through the leader; also a marker's; 0 if nothing."""
        last = await self._last(tokens, leader=True)
        if last is not None and not last.is_marker:
            await self._is_unreadable(last)  # keeps an unreadable value, which is about to be overwritten
        return 0 if last is None else last.sequence

    async def _write(
        self, message: Sendable, expected: int | None, ttl_s: float | None, tokens: dict[str, Any]
    ) -> int:
        bus = self._bus
        subject = self.row(**tokens)
        headers: dict[str, str] = {}
        if expected is not None:
            headers[EXPECTED] = str(expected)
        if ttl_s is not None:
            headers["Nats-TTL"] = str(whole_seconds(ttl_s))
        payload = codec.encode(message, bus.sender_map, bus.next_id())
        try:
            return await jetstream.publish(
                bus.connection, subject, payload, headers or None, timeout_s=self._call_s
            )
        except Conflict as error:
            key = self.row.key(**tokens)
            raise Conflict(f"{self.row.name} {key} moved on from revision {expected}", key=key) from error

    # --- reading -------------------------------------------------------------------------------------------

    async def get(self, *, leader: bool = False, **tokens: Any) -> KeyValueEntry | None:
        """The present value, or None; with `leader`, never an older one, for decisions that depend on it.

        Raises:
            UnreadableRecord: the value can't be read as one of the row, and its bucket keeps no earlier ones.
            NewerRecord: the value has a version that this software does not read.
        """
        item = await self._last(tokens, leader=leader)
        if item is None or item.is_marker:
            return None
        try:
            return self._entry(item)
        except BadMessage as error:
            return await self._replacement(item, error)

    async def _last(self, tokens: dict[str, Any], *, leader: bool) -> jetstream.StreamMessage | None:
        subject = self.row(**tokens)
        return await jetstream.last(
            self._bus.connection, self._stream, subject, leader=leader, timeout_s=self._call_s
        )

    async def keys(self, **tokens: Any) -> list[str]:
        """The present keys; tokens that are not given match anything."""
        return [self._key(item) for item in await self._read_present(tokens, headers_only=True)]

    async def entries(self, *, strict: bool = False, **tokens: Any) -> list[KeyValueEntry]:
        """The present values.

        A value that can't be read is replaced by the one before it if the bucket keeps earlier ones;
        otherwise it is counted and left out.

        Raises:
            NewerRecord: with `strict`, a value has a version that this software does not read.
        """
        entries = []
        for item in await self._read_present(tokens, headers_only=False):
            try:
                entries.append(self._entry(item))
            except BadMessage as error:
                try:
                    replacement = await self._replacement(item, error)
                except UnreadableRecord:
                    continue
                except NewerRecord:
                    if strict:
                        raise
                    continue
                if replacement is not None:
                    entries.append(replacement)
        return entries

    async def _replacement(self, item: jetstream.StreamMessage, error: BadMessage) -> KeyValueEntry | None:
        """The replacement of a value that can't be read: the value before it, or None if there was none.

        Raises:
            UnreadableRecord, NewerRecord: there is no replacement.
        """
        await dead_letter(self._bus, self.row, item.subject, item.data, error)
        await quarantine(self._bus, self.row, item, error)
        verdict = judged(self.row, item, error)
        if isinstance(verdict, NewerRecord) or self.row.bucket not in KEEPS_PREVIOUS:
            raise verdict from error
        return await self._previous(item)

    async def _previous(self, item: jetstream.StreamMessage) -> KeyValueEntry | None:
        """The last value before this one that can be read, of a bucket that keeps them."""
        previous: KeyValueEntry | None = None
        async with OrderedConsumer.open(self._bus.connection, self._stream, item.subject, start=1) as reader:
            async for earlier in reader.present():
                if earlier.is_marker:
                    previous = None
                elif earlier.sequence < item.sequence:
                    with contextlib.suppress(BadMessage):
                        previous = self._entry(earlier)
        return previous and replace(previous, revision=item.sequence, stale=True)

    async def _is_unreadable(self, item: jetstream.StreamMessage) -> bool:
        """Whether the value can't be read, and none stands for it; it is kept elsewhere.

        Raises:
            NewerRecord: the value has a version that this software does not read.
        """
        try:
            self._entry(item)
        except BadMessage as error:
            await quarantine(self._bus, self.row, item, error)
            if isinstance(verdict := judged(self.row, item, error), NewerRecord):
                raise verdict from error
            return self.row.bucket not in KEEPS_PREVIOUS or await self._previous(item) is None
        return False

    async def _read_present(
        self, tokens: dict[str, Any], *, headers_only: bool
    ) -> list[jetstream.StreamMessage]:
        subject = self.row.wildcard(**tokens)
        connection = self._bus.connection
        deadline = time.monotonic() + self._bus.times.bucket_missing_s
        while True:
            latest: dict[str, jetstream.StreamMessage] = {}
            try:
                async with OrderedConsumer.open(
                    connection, self._stream, subject, headers_only=headers_only
                ) as reader:
                    async for item in reader.present():
                        latest[item.subject] = item
                return [item for item in latest.values() if not item.is_marker]
            except (Unavailable, NotFound):
                if not connection.online.is_set() or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(self._bus.times.watch_pause_s)

    def _entry(self, item: jetstream.StreamMessage) -> KeyValueEntry:
        message, envelope = codec.decode(item.data, self.row.schema)
        return KeyValueEntry(self._key(item), item.sequence, message, envelope)

    def _key(self, item: jetstream.StreamMessage) -> str:
        return item.subject[len(self.row.prefix) + 1 :]

    # --- watching ------------------------------------------------------------------------------------------

    async def guard(self, mend: Mend | None = None, **tokens: Any) -> Watch:
        """Watches for unreadable values, as a service that writes this row: each is kept elsewhere, then
        `mend(key, revision)` is called; by default it restores the value before it, or removes the key."""

        async def ignore(change: Change) -> None:
            return None

        return await self.watch(ignore, mend=mend or self.put_back, **tokens)

    async def put_back(self, key: str, revision: int) -> None:
        """Restores the value before `revision`, which can't be read; removes the key if there was none."""
        tokens: dict[str, Any] | None = self.row.matches(f"{self.row.prefix}.{key}")
        if tokens is None:  # no key of this row, so nobody reads it
            return
        entry = await self.get(leader=True, **tokens)
        if entry is None:
            await self.delete(revision=revision, **tokens)
        elif entry.stale:
            await self.update(entry.message, revision=entry.revision, **tokens)

    async def watch(self, handler: WatchHandler, *, mend: Mend | None = None, **tokens: Any) -> Watch:
        """Calls `handler(change)`: first for every present value, then `Change("")`, then for each change.

        Calls come one at a time and in order of revision. After an interruption of any kind the watch is made
        anew: the handler gets what changed meanwhile, keys that disappeared as `message=None`, nothing that
        stayed the same, and another `Change("")` once the watch is current again. For a value that can't be
        read, only `mend(key, revision)` is called. If the watch knew no value of that key yet, the handler
        gets the value before it, if the bucket keeps earlier ones.

        Raises:
            NotFound, BusUnreachable: at the start; the watch recovers from later interruptions.
        """
        subject = self.row.wildcard(**tokens)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = Watch()
        watch.task = self._bus.connection.spawn(
            self._watching(handler, mend, subject, started), f"watch {subject}"
        )
        try:
            await started
        except BaseException:
            await watch.stop()
            raise
        return watch

    async def _watching(
        self, handler: WatchHandler, mend: Mend | None, subject: str, started: asyncio.Future[None]
    ) -> None:
        known: dict[str, int] = {}
        connection = self._bus.connection
        deadline = time.monotonic() + self._bus.times.bucket_missing_s
        while True:
            try:
                async with OrderedConsumer.open(connection, self._stream, subject) as reader:
                    if not started.done():
                        started.set_result(None)
                    await self._follow(reader, handler, mend, known)
            except DmscError as error:
                patient = isinstance(error, Unavailable) and connection.online.is_set()
                if not started.done() and not (patient and time.monotonic() < deadline):
                    started.set_exception(error)
                    return
                log.debug("watch interrupted", subject=subject, error=error.text)
            await asyncio.sleep(self._bus.times.watch_pause_s)
            await connection.wait_online()

    async def _follow(
        self, reader: OrderedConsumer, handler: WatchHandler, mend: Mend | None, known: dict[str, int]
    ) -> None:
        current = False
        seen: set[str] = set()

        async def mark_current() -> None:
            nonlocal current
            current = True
            for missing_key in [key for key in known if key not in seen]:
                revision = known.pop(missing_key)
                await self._call_handler(handler, Change(missing_key, revision))
            await self._call_handler(handler, Change("", 0))

        if reader.waiting == 0:
            await mark_current()
        async with contextlib.aclosing(reader.follow()) as items:
            async for item in items:
                if item is not None:
                    key = self._key(item)
                    seen.add(key)
                    await self._apply_change(item, key, handler, mend, known)
                if not current and (item is None or item.pending == 0):
                    await mark_current()
                    seen.clear()

    async def _apply_change(
        self,
        item: jetstream.StreamMessage,
        key: str,
        handler: WatchHandler,
        mend: Mend | None,
        known: dict[str, int],
    ) -> None:
        if item.is_marker:
            if known.pop(key, None) is not None:
                await self._call_handler(handler, Change(key, item.sequence))
            return
        if known.get(key) == item.sequence:
            return
        try:
            message, _ = codec.decode(item.data, self.row.schema)
        except BadMessage as error:
            fresh = key not in known
            known[key] = item.sequence
            with contextlib.suppress(DmscError):
                replacement = await self._replacement(item, error)
                if fresh and replacement is not None:
                    await self._call_handler(handler, Change(key, item.sequence, replacement.message))
            if mend is not None and isinstance(judged(self.row, item, error), UnreadableRecord):
                await self._call_mend(mend, key, item.sequence)
            return
        known[key] = item.sequence
        await self._call_handler(handler, Change(key, item.sequence, message))

    async def _call_mend(self, mend: Mend, key: str, revision: int) -> None:
        try:
            await mend(key, revision)
        except DmscError as error:  # another writer was first, or the bus is away and the watch sees it again
            log.info("record not mended", record=f"{self.row.bucket}.{key}", reason=error.text)
        except Exception as error:
            self._bus.counters.handler_errors += 1
            log.error("record not mended", record=f"{self.row.bucket}.{key}", exc_info=error)

    async def _call_handler(self, handler: WatchHandler, change: Change) -> None:
        try:
            await handler(change)
        except asyncio.CancelledError:
            if asked_to_end():
                raise
            self._bus.counters.handler_errors += 1
            log.error("watch handler was cancelled from within", bucket=self.row.bucket, key=change.key)
        except Exception as error:
            self._bus.counters.handler_errors += 1
            log.error("watch handler failed", bucket=self.row.bucket, key=change.key, exc_info=error)


def whole_seconds(ttl_s: float) -> int:
    """A time to live in the server's unit: whole seconds, rounded up, at least one."""
    return max(1, math.ceil(ttl_s))
