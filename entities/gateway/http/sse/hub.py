"""One consumer of the bus for all HTTP clients that follow the same events, however many and however slow.

A subject hub reads its subject once, keeps the last records in client form, and wakes the waiting clients. A
client that begins further back first gets the past, in pieces, from a reader that exists only while it reads.
Nothing ever waits for a client: one that falls behind the kept records gets `lagged` and is disconnected. It
may come back with the id of the last record that it had.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.streams import StreamRecord
from bus.subject_row import Subject
from entities.gateway.http.sse.format import EventLine, EventsConfig, closing, lagged
from entities.gateway.server_sent_events import KEEPALIVE
from entities.metrics import EVENT_FEEDS, EVENT_STREAMS, STREAMS_LAGGED, MetricReading
from schemas.errors import Overloaded, RateLimited

log = get_logger("gateway")

Render = Callable[[StreamRecord], EventLine | None]
PIECE_BYTES = 64 << 10
"""Bytes given to a client's connection at once; the next piece waits until the connection took this one."""


class SubjectHub:
    """The kept records of one subject, numbered `low` to `high`-1, complete from sequence `floor` on."""

    def __init__(self, floor: int, lines: list[EventLine], config: EventsConfig) -> None:
        self.floor = floor
        self.low = self.high = 0
        self.followers = 0
        self.over = False
        self.task: asyncio.Task[None] | None = None
        self._config = config
        self._lines: dict[int, EventLine] = {}
        self._bytes = 0
        self._waiting: set[asyncio.Future[bool]] = set()
        for line in lines:
            self.add(line)

    def add(self, line: EventLine) -> None:
        self._lines[self.high] = line
        self.high += 1
        self._bytes += len(line.data)
        config = self._config
        while self.high - self.low > config.kept_lines or (
            self._bytes > config.kept_bytes and self.high - self.low > 1
        ):
            oldest = self._lines.pop(self.low)
            self._bytes -= len(oldest.data)
            self.floor = oldest.sequence + 1
            self.low += 1

    def number_behind(self, position: int) -> int:
        """The number of the first kept record whose sequence is above `position`."""
        number = self.high
        while number > self.low and self._lines[number - 1].sequence > position:
            number -= 1
        return number

    def take(self, number: int) -> tuple[bytes, int, EventLine | None]:
        """A piece of the records from `number` on, the number behind it, and its last record if any."""
        lines: list[EventLine] = []
        size = 0
        while number < self.high and size < PIECE_BYTES:
            lines.append(self._lines[number])
            size += len(lines[-1].data)
            number += 1
        return b"".join(line.data for line in lines), number, lines[-1] if lines else None

    async def wait(self, timeout_s: float) -> bool:
        """Waits for more records; False if none came within `timeout_s`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting.add(future)
        # Cheaper than asyncio.timeout, and every event to every client passes here.
        timer = loop.call_later(timeout_s, _settle, future, False)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.discard(future)

    def wake(self) -> None:
        """Wakes all waiting clients, a few at a time: a thousand in a row would delay every request."""
        waiting, self._waiting = iter(self._waiting), set()
        loop = asyncio.get_running_loop()

        def wake_some() -> None:
            for _ in range(self._config.woken):
                future = next(waiting, None)
                if future is None:
                    return
                _settle(future, True)
            loop.call_soon(wake_some)

        wake_some()


class EventHub:
    """The subject hubs of one gateway, and the number of streams that each identity has open."""

    def __init__(self, bus: Bus, gateway: str, config: EventsConfig) -> None:
        self.config = config
        self.draining = False
        self._bus = bus
        self._gateway = gateway
        self._hubs: dict[tuple[Any, ...], SubjectHub] = {}
        self._readers = asyncio.Semaphore(config.readers)
        self._open: Counter[str] = Counter()
        self._lagged = 0

    @property
    def open(self) -> int:
        return self._open.total()

    @contextlib.contextmanager
    def admitted(self, identity: str) -> Iterator[None]:
        """Counts one more stream, or request of a service, of this identity, for the length of the block.

        Raises:
            RateLimited: the identity has as many streams as it may.
            Overloaded: the gateway has as many streams as it may.
        """
        if self.open >= self.config.streams:
            raise Overloaded(
                "too many event streams and requests of services are open here; try another gateway, "
                "or again in 5 s",
                retry_after_s=5.0,
            )
        if self._open[identity] >= self.config.streams_each:
            raise RateLimited(
                f"you have {self.config.streams_each} event streams and requests of services open, which is "
                "the most; close one, or wait for one",
                retry_after_s=1.0,
            )
        self._open[identity] += 1
        try:
            yield
        finally:
            self._open[identity] -= 1
            if not self._open[identity]:
                del self._open[identity]

    async def follow(
        self,
        row: Subject,
        tokens: dict[str, Any],
        render: Render,
        start: int,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[bytes, None]:
        """Yields pieces of an event stream from sequence `start` on.

        The stream ends behind a last record, or with an event that states why (`lagged`, `closing`).
        `has_ended`: whether nothing more will come even if no record says so.
        """
        key = (row.name, *tokens.items())
        position = start - 1
        yield b": " + row.name.encode() + b"\n\n"
        while (hub := self._hubs.get(key)) is None or position + 1 < hub.floor:
            if self.draining:
                yield closing()
                return
            limit = None if hub is None else hub.floor
            began = position + 1
            lines, whole = await self._past(row, tokens, render, began, limit)
            present = self._hubs.get(key)
            if whole and present is None and not (lines and lines[-1].last):
                # No record is missing between the past just read and those that will come.
                hub = self._begin(key, row, tokens, render, began, lines)
                break
            if lines:
                yield b"".join(line.data for line in lines)
                position = lines[-1].sequence
                if lines[-1].last:
                    return
            if whole and limit is not None:
                position = max(position, limit - 1)
        async with contextlib.aclosing(self._live(key, hub, position, has_ended)) as pieces:
            async for piece in pieces:
                yield piece

    async def _live(
        self, key: tuple[Any, ...], hub: SubjectHub, position: int, has_ended: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        hub.followers += 1
        number = hub.number_behind(position)
        try:
            while True:
                if number < hub.low:
                    self._lagged += 1
                    yield lagged(position)
                    return
                piece, number, last = hub.take(number)
                if last is not None:
                    position = last.sequence
                    yield piece
                    if last.last:
                        return
                    continue
                if self.draining:
                    yield closing()
                    return
                if hub.over:
                    return  # the subscription failed for good: the client comes back with Last-Event-ID
                ended = has_ended()
                if not await hub.wait(self.config.tail_s if ended else self.config.keepalive_s):
                    if ended:
                        return  # the job has ended, and no more records came
                    yield KEEPALIVE
        finally:
            hub.followers -= 1
            if not hub.followers and self._hubs.get(key) is hub:
                del self._hubs[key]
                if hub.task is not None:
                    hub.task.cancel()

    def _begin(
        self,
        key: tuple[Any, ...],
        row: Subject,
        tokens: dict[str, Any],
        render: Render,
        floor: int,
        lines: list[EventLine],
    ) -> SubjectHub:
        """Starts a subject hub that has `lines` already and reads on behind them."""
        hub = self._hubs[key] = SubjectHub(floor, lines, self.config)
        start = lines[-1].sequence + 1 if lines else floor

        async def read() -> None:
            try:
                async for recorded in self._bus.history(row, start=start, follow=True, **tokens):
                    line = render(recorded)
                    if line is not None:
                        hub.add(line)
                        hub.wake()
            finally:
                hub.over = True
                if self._hubs.get(key) is hub:
                    del self._hubs[key]
                hub.wake()

        hub.task = asyncio.create_task(read(), name=f"event hub {key}")
        hub.task.add_done_callback(_log_failure)
        return hub

    async def _past(
        self, row: Subject, tokens: dict[str, Any], render: Render, start: int, limit: int | None
    ) -> tuple[list[EventLine], bool]:
        """Past records from `start` on, below sequence `limit`, and whether these were all of them."""
        lines: list[EventLine] = []
        size = 0
        async with self._readers:
            past = self._bus.history(row, start=start, **tokens)
            async with contextlib.aclosing(past):
                async for recorded in past:
                    if limit is not None and recorded.sequence >= limit:
                        return lines, True
                    line = render(recorded)
                    if line is None:
                        continue
                    lines.append(line)
                    size += len(line.data)
                    if len(lines) >= self.config.read_lines or size >= self.config.read_bytes or line.last:
                        return lines, False
        return lines, True

    def drain(self) -> None:
        """Ends every stream with `closing`."""
        self.draining = True
        for hub in self._hubs.values():
            hub.wake()

    def readings(self) -> Iterator[MetricReading]:
        yield EVENT_STREAMS(self.open, gateway=self._gateway)
        yield EVENT_FEEDS(len(self._hubs), gateway=self._gateway)
        yield STREAMS_LAGGED(self._lagged, gateway=self._gateway)


def _settle(future: asyncio.Future[bool], outcome: bool) -> None:
    if not future.done():
        future.set_result(outcome)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("event hub ended", hub=task.get_name(), error=str(task.exception()))
