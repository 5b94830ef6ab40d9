"""Typed key-value with expiry done right.

nats-py's own `get()` returns an empty entry after an expiry and its `create()` then fails; its watchers
stall after a server restart and never learn of an expiry that happened meanwhile. Here a marker of any
kind means absence, a create over a marker names the marker's revision, and a watch that was interrupted
compares what it finds with what it knew.
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
from bus.messaging.stream_specs import KEEPS_PREVIOUS
from bus.messaging.unreadable_values import judged, quarantine
from bus.nats import jetstream
from bus.nats.client import asked_to_end
from bus.nats.jetstream import DELETION, EXPECTED
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject import Subject
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

ANSWER_S = 1.5
"""A cluster that elects a stream's leader answers nobody: whoever asked before must ask again after, and
should not notice late that it is over. Outlasts the sync of a busy disk."""
ANSWER_EACH_S = 0.005
"""More for each message of a batch: a large one's acknowledgement waits behind all that came meanwhile."""
PAUSE_S = 0.05
"""Before an interrupted watch is made again: a restarted server needs a moment to load its streams."""
PATIENCE_S = 20.0
"""Longest wait for a bucket that the bus does not serve yet: it was just made, or its leader is elected."""
BATCH_LEAST = 4
"""From so many values on, a batch is worth its round trip."""
CREATE_ATTEMPTS = 5
"""A create may find a marker that another writer replaces meanwhile; more often than this is a conflict."""


@dataclass(frozen=True, slots=True)
class KeyValueEntry:
    """A key's present value."""

    key: str
    revision: int
    message: Any
    envelope: Envelope
    stale: bool = False
    """The newest value, of `revision`, can't be read: this is the last one before it that can."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One of many writes: `message` None deletes; `revision` is what the key must have, 0: nothing."""

    tokens: dict[str, Any]
    message: Sendable | None
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """What a watch saw: a value, or `message=None` for deleted or expired. Key "" marks "now current"."""

    key: str
    revision: int
    message: Any = None


WatchHandler = Callable[[Change], Awaitable[None]]
Mend = Callable[[str, int], Awaitable[None]]
"""Takes the key and the revision of a value that can't be read."""


class Watch:
    """A running watch; `stop()` ends it, twice is fine."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    async def stop(self, drain: bool = True) -> None:
        task = self.task
        if task is None or task is asyncio.current_task():
            self.task = None
            if task is not None:
                task.cancel()
            return
        self.task = None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Bucket:
    """The bucket of one row of the table of subjects; keys are made of the row's tokens.

    Any call raises `BusUnreachable` at once when the connection is or gets lost, and `DeadlineExceeded`
    when the bus does not answer in time. After either, a write may or may not have happened: read again
    (`get(leader=True)`) before drawing conclusions.
    """

    def __init__(self, bus: BusPort, row: Subject) -> None:
        if row.bucket is None:
            raise NotFound(f"subject {row.name} has no bucket", subject=row.name)
        self.row = row
        self._bus = bus
        self._stream = f"KV_{row.bucket}"

    # --- writing -------------------------------------------------------------------------------------------

    async def put(self, message: Sendable, *, ttl_s: float | None = None, **tokens: Any) -> int:
        """Writes whatever was there before; returns the revision.

        `ttl_s` is rounded up to whole seconds, at least one: the server knows no finer.
        """
        return await self._write(message, None, ttl_s, tokens)

    async def create(self, message: Message, *, ttl_s: float | None = None, **tokens: Any) -> int:
        """Writes only if the key is absent (never there, deleted, or expired); returns the revision.

        Raises:
            Conflict: the key is there.
        """
        expected = 0
        for _ in range(CREATE_ATTEMPTS):
            try:
                return await self._write(message, expected, ttl_s, tokens)
            except Conflict:
                # Through the leader: a replica may not have the marker yet.
                last = await jetstream.last(
                    self._bus.link, self._stream, self.row(**tokens), leader=True, timeout_s=ANSWER_S
                )
                if last is not None and not last.is_marker and not await self._unusable(last):
                    raise Conflict(f"{self.row.name} {self.row.key(**tokens)} exists already") from None
                expected = 0 if last is None else last.sequence
        raise Conflict(f"{self.row.name} {self.row.key(**tokens)}: others write it at the same time")

    async def update(
        self, message: Message, *, revision: int, ttl_s: float | None = None, **tokens: Any
    ) -> int:
        """Compare-and-set: writes only if the key still has `revision`; returns the new one.

        Raises:
            Conflict: it moved on.
            DeadlineExceeded, BusUnreachable: unknown whether it was written; read again through the leader.
        """
        return await self._write(message, revision, ttl_s, tokens)

    async def delete(self, *, revision: int | None = None, **tokens: Any) -> None:
        """Removes the key, or with `revision` only if it still has that. The mark that watchers see goes
        away by itself.

        Raises:
            Conflict: it moved on from `revision`.
        """
        headers = DELETION if revision is None else DELETION | {EXPECTED: str(revision)}
        await jetstream.publish(self._bus.link, self.row(**tokens), b"", headers, timeout_s=ANSWER_S)

    async def write_many(self, writings: Sequence[Writing]) -> list[int | DmscError]:
        """Compare-and-sets of different keys. Each one's revision, or why it was not written: see `update`.

        Values go in batches, each of which the server takes as a whole and syncs once; where it does not
        take one, because one of the keys has moved on, they go one behind the other, as deletions do.
        """
        found: dict[int, int | DmscError] = {}
        values = [place for place, writing in enumerate(writings) if writing.message is not None]
        for start in range(0, len(values), jetstream.BATCH_MOST):
            places = values[start : start + jetstream.BATCH_MOST]
            if len(places) < BATCH_LEAST:
                continue
            batch = [self._published(writings[place]) for place in places]
            try:
                revisions = await jetstream.publish_batch(
                    self._bus.link,
                    self._bus.next_id(),
                    batch,
                    timeout_s=ANSWER_S + len(batch) * ANSWER_EACH_S,
                )
                found.update(zip(places, revisions, strict=True))
            except (BusUnreachable, DeadlineExceeded) as error:
                found.update((place, error) for place in places)
            except DmscError as error:
                log.debug("batch not taken", bucket=self.row.bucket, error=error.text)
        left = [place for place in range(len(writings)) if place not in found]
        singly = [self._published(writings[place]) for place in left]
        outcomes = await jetstream.publish_many(self._bus.link, singly, timeout_s=ANSWER_S)
        found.update(zip(left, outcomes, strict=True))
        return [found[place] for place in range(len(writings))]

    def _published(self, writing: Writing) -> tuple[str, bytes, dict[str, str]]:
        headers = {EXPECTED: str(writing.revision)}
        subject = self.row(**writing.tokens)
        if writing.message is None:
            return subject, b"", headers | DELETION
        return subject, codec.encode(writing.message, self._bus.sender_map, self._bus.next_id()), headers

    async def revision(self, **tokens: Any) -> int:
        """What an `update` of the key must name, as its leader has it: also that of the mark of a deleted
        key; 0 where there is nothing."""
        last = await jetstream.last(
            self._bus.link, self._stream, self.row(**tokens), leader=True, timeout_s=ANSWER_S
        )
        if last is not None and not last.is_marker:
            await self._unusable(last)  # kept, for it is about to be overwritten
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
            return await jetstream.publish(bus.link, subject, payload, headers or None, timeout_s=ANSWER_S)
        except Conflict as error:
            key = self.row.key(**tokens)
            raise Conflict(f"{self.row.name} {key} moved on from revision {expected}", key=key) from error

    # --- reading -------------------------------------------------------------------------------------------

    async def get(self, *, leader: bool = False, **tokens: Any) -> KeyValueEntry | None:
        """The present value, or None. `leader=True` where a decision hangs on it: never an older one.

        Raises:
            UnreadableRecord: what stands there is no value of the row, and its bucket keeps none before it.
            NewerRecord: it is of a version that this software does not read.
        """
        item = await jetstream.last(
            self._bus.link, self._stream, self.row(**tokens), leader=leader, timeout_s=ANSWER_S
        )
        if item is None or item.is_marker:
            return None
        try:
            return self._entry(item)
        except BadMessage as error:
            return await self._instead(item, error)

    async def keys(self, **tokens: Any) -> list[str]:
        """The keys there are; tokens not given match anything."""
        return [self._key(item) for item in await self._read_present(tokens, headers_only=True)]

    async def entries(self, *, strict: bool = False, **tokens: Any) -> list[KeyValueEntry]:
        """The values there are. For one that can't be read stands the one before it, where the bucket keeps
        that; else it is counted and left out.

        Raises:
            NewerRecord: with `strict`, one is of a version that this software does not read.
        """
        found = []
        for item in await self._read_present(tokens, headers_only=False):
            try:
                found.append(self._entry(item))
            except BadMessage as error:
                try:
                    instead = await self._instead(item, error)
                except UnreadableRecord:
                    continue
                except NewerRecord:
                    if strict:
                        raise
                    continue
                if instead is not None:
                    found.append(instead)
        return found

    async def _instead(self, item: jetstream.StreamMessage, error: BadMessage) -> KeyValueEntry | None:
        """What stands for a value that can't be read; None: there was nothing before it.

        Raises:
            UnreadableRecord, NewerRecord: nothing does.
        """
        await dead_letter(self._bus, self.row, item.subject, item.data, error)
        await quarantine(self._bus, self.row, item, error)
        found = judged(self.row, item, error)
        if isinstance(found, NewerRecord) or self.row.bucket not in KEEPS_PREVIOUS:
            raise found from error
        previous: KeyValueEntry | None = None
        async with OrderedConsumer.open(self._bus.link, self._stream, item.subject, start=1) as reader:
            async for each in reader.present():
                if each.is_marker:
                    previous = None
                elif each.sequence < item.sequence:
                    with contextlib.suppress(BadMessage):
                        previous = self._entry(each)
        return previous and replace(previous, revision=item.sequence, stale=True)

    async def _unusable(self, item: jetstream.StreamMessage) -> bool:
        """Whether what stands there is as good as nothing; then it is kept elsewhere.

        Raises:
            NewerRecord: it is of a version that this software does not read.
        """
        try:
            self._entry(item)
        except BadMessage as error:
            await quarantine(self._bus, self.row, item, error)
            if isinstance(found := judged(self.row, item, error), NewerRecord):
                raise found from error
            return True
        return False

    async def _read_present(
        self, tokens: dict[str, Any], *, headers_only: bool
    ) -> list[jetstream.StreamMessage]:
        subject = self.row.wildcard(**tokens)
        link = self._bus.link
        deadline = time.monotonic() + PATIENCE_S
        while True:
            latest: dict[str, jetstream.StreamMessage] = {}
            try:
                async with OrderedConsumer.open(
                    link, self._stream, subject, headers_only=headers_only
                ) as reader:
                    async for item in reader.present():
                        latest[item.subject] = item
                return [item for item in latest.values() if not item.is_marker]
            except (Unavailable, NotFound):
                if not link.online.is_set() or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(PAUSE_S)

    def _entry(self, item: jetstream.StreamMessage) -> KeyValueEntry:
        message, envelope = codec.decode(item.data, self.row.schema)
        return KeyValueEntry(self._key(item), item.sequence, message, envelope)

    def _key(self, item: jetstream.StreamMessage) -> str:
        return item.subject[len(self.row.prefix) + 1 :]

    # --- watching ------------------------------------------------------------------------------------------

    async def guard(self, mend: Mend | None = None, **tokens: Any) -> Watch:
        """Watches for values that can't be read, as a service that writes this row: each is kept elsewhere,
        then `mend(key, revision)` is called; without it, what was there before is written again, or the key
        removed.
        """

        async def ignore(change: Change) -> None:
            return None

        return await self.watch(ignore, mend=mend or self.put_back, **tokens)

    async def put_back(self, key: str, revision: int) -> None:
        """Writes what stood there before `revision`, which can't be read; was that nothing, the key goes."""
        tokens: dict[str, Any] | None = self.row.matches(f"{self.row.prefix}.{key}")
        if tokens is None:  # no key of this row: nobody reads it
            return
        entry = await self.get(leader=True, **tokens)
        if entry is None:
            await self.delete(revision=revision, **tokens)
        elif entry.stale:
            await self.update(entry.message, revision=entry.revision, **tokens)

    async def watch(self, handler: WatchHandler, *, mend: Mend | None = None, **tokens: Any) -> Watch:
        """Calls `handler(change)`: first every present value, then `Change("")`, then each change.

        One at a time and in order of revision. After an interruption of any kind the watch is made
        anew: what changed meanwhile is told, keys that went away meanwhile as `message=None`, what
        stayed the same is not repeated, and another `Change("")` says that it is current again.
        A value that can't be read changes nothing, but that `mend(key, revision)` is called; a watch that
        begins with one is told the value before it, where the bucket keeps that.

        Raises:
            NotFound, BusUnreachable: at the start; later interruptions are mended.
        """
        subject = self.row.wildcard(**tokens)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = Watch()
        watch.task = self._bus.link.spawn(self._watching(handler, mend, subject, started), f"watch {subject}")
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
        link = self._bus.link
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with OrderedConsumer.open(link, self._stream, subject) as reader:
                    if not started.done():
                        started.set_result(None)
                    await self._follow(reader, handler, mend, known)
            except DmscError as error:
                patient = isinstance(error, Unavailable) and link.online.is_set()
                if not started.done() and not (patient and time.monotonic() < deadline):
                    started.set_exception(error)
                    return
                log.debug("watch interrupted", subject=subject, error=error.text)
            await asyncio.sleep(PAUSE_S)
            await link.wait_online()

    async def _follow(
        self, reader: OrderedConsumer, handler: WatchHandler, mend: Mend | None, known: dict[str, int]
    ) -> None:
        current = False
        seen: set[str] = set()

        async def mark_current() -> None:
            nonlocal current
            current = True
            for gone in [key for key in known if key not in seen]:
                revision = known.pop(gone)
                await self._call_handler(handler, Change(gone, revision))
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
                instead = await self._instead(item, error)
                if fresh and instead is not None:
                    await self._call_handler(handler, Change(key, item.sequence, instead.message))
            if mend is not None and isinstance(judged(self.row, item, error), UnreadableRecord):
                await self._call_mend(mend, key, item.sequence)
            return
        known[key] = item.sequence
        await self._call_handler(handler, Change(key, item.sequence, message))

    async def _call_mend(self, mend: Mend, key: str, revision: int) -> None:
        try:
            await mend(key, revision)
        except DmscError as error:  # somebody else has written meanwhile; or the bus is away: told anew after
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
    """A time to live as the server takes it: whole seconds, rounded up, at least one."""
    return max(1, math.ceil(ttl_s))
