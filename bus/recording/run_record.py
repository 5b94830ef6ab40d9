"""A run's record: what the streams hold of one job, from all of them, in the order of the server's clock.

Everything that functional modules take in, what they suggested, what was decided, what became of it: each row
of the table that a stream keeps; log lines, dead letters, unreadable records and the audit excepted. Rows
that name a job are read for that job; those that concern the whole mesh (signals, node samples) for the time
that it ran. How long the streams keep it stands in `bus.messaging.stream_specs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.nats import jetstream
from bus.nats.jetstream import NANO, StreamMessage
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject import Subject
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import NotFound, Unavailable
from schemas.job import ENDED, JobEvent

RECORDED: tuple[Subject, ...] = tuple(
    row
    for row in subjects.SUBJECTS
    if row.stream is not None and row.stream not in ("LOGS", "DEAD_LETTERS", "UNREADABLE", "AUDIT")
)
"""Rows of which a run's record is made."""

BEFORE_S = 12.0
"""Of the mesh's own rows, what was said before the job is part of it: one period of the registry's full
state (10 s), so that a module that starts with the record knows who is there."""

AFTER_S = 5.0
"""Decisions and reports that follow a job's last event."""

RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Frame:
    """One recorded message, as it was sent. `at_ns`: when the server stored it, ns since the epoch."""

    row: Subject
    at_ns: int
    subject: str
    data: bytes

    @property
    def at(self) -> float:
        """Seconds since the epoch."""
        return self.at_ns / NANO

    def open(self) -> tuple[Message, Envelope]:
        """Raises `BadMessage`."""
        return codec.decode(self.data, self.row.schema)


@dataclass(frozen=True, slots=True)
class RunSpan:
    """When a job ran, by its first and its last event, seconds since the epoch; `until` is infinite while it
    has not ended, `last` is its last event so far."""

    began: float
    until: float
    last: float
    ended: bool


async def read_run(bus: Bus, job: str, span: RunSpan) -> AsyncGenerator[Frame, None]:
    """Everything recorded of a job, oldest first; memory is bounded by one batch per row.

    Raises:
        Unavailable: the bus went away meanwhile, and did not come back.
    """
    sources = [_source(bus, row, job, span) for row in RECORDED]
    waiting: list[tuple[int, int, Frame]] = []
    try:
        for rank, source in enumerate(sources):
            await _advance(waiting, rank, source)
        while waiting:
            _, rank, frame = heapq.heappop(waiting)
            yield frame
            await _advance(waiting, rank, sources[rank])
    finally:
        for source in sources:
            await source.aclose()


async def _advance(
    waiting: list[tuple[int, int, Frame]], rank: int, source: AsyncGenerator[Frame, None]
) -> None:
    """Of two messages of one nanosecond, that of the earlier row is first: always the same order."""
    with contextlib.suppress(StopAsyncIteration):
        frame = await anext(source)
        heapq.heappush(waiting, (frame.at_ns, rank, frame))


async def _source(bus: Bus, row: Subject, job: str, span: RunSpan) -> AsyncGenerator[Frame, None]:
    """One row's part. A consumer that was not asked for a minute is gone: another one goes on there."""
    assert row.stream is not None
    mine = "job" in row.tokens
    pattern = row.wildcard(job=job) if mine else row.wildcard()
    begins = span.began - (AFTER_S if mine else BEFORE_S)
    until = span.until + AFTER_S
    position: int | None = None
    failed = 0
    while True:
        place: dict[str, Any] = {"since": begins} if position is None else {"start": position}
        try:
            async with (
                OrderedConsumer.open(bus.link, row.stream, pattern, **place) as reader,
                contextlib.aclosing(reader.present()) as items,
            ):
                async for item in items:
                    if item.at > until:
                        return
                    position = item.sequence + 1
                    failed = 0
                    if mine or _concerns(item, job):
                        yield Frame(row, item.at_ns, item.subject, item.data)
            return
        except NotFound:
            return  # the stream was made by an older version, without this row, or not at all
        except Unavailable:
            failed += 1
            if bus.link.closing or failed > 3:
                raise
        await asyncio.sleep(RETRY_S)
        await bus.link.wait_online()


def _concerns(item: StreamMessage, job: str) -> bool:
    """Whether a message of a row of the whole mesh is about this job, or about none in particular."""
    body = codec.peek(item.data).get("body")
    return not isinstance(body, Mapping) or body.get("job", None) in (None, job)


async def span_of(bus: Bus, job: str) -> RunSpan:
    """
    Raises:
        NotFound: nothing is recorded of it (any more).
    """
    row = subjects.JOB_EVENT
    assert row.stream is not None
    last = await jetstream.last(bus.link, row.stream, row(job=job), leader=False)
    if last is None:
        raise NotFound(f"nothing is recorded of a job {job}: `dmsc runs list` shows what is", job=job)
    async with (
        OrderedConsumer.open(bus.link, row.stream, row(job=job), start=1) as reader,
        contextlib.aclosing(reader.present()) as items,
    ):
        first = await anext(items, last)
    message, _ = codec.decode(last.data, row.schema)
    ended = isinstance(message, JobEvent) and message.state in ENDED
    return RunSpan(first.at, last.at if ended else math.inf, last.at, ended)


async def counts(bus: Bus) -> dict[str, dict[str, int]]:
    """Messages that the streams hold, per job and row: without reading one of them."""
    found: dict[str, dict[str, int]] = {}
    for row in RECORDED:
        if "job" not in row.tokens or row.stream is None:
            continue
        offset = 0
        while True:
            wanted = {"subjects_filter": row.wildcard(), "offset": offset}
            try:
                info = await jetstream.call(bus.link, f"STREAM.INFO.{row.stream}", wanted)
            except NotFound:
                break
            page: dict[str, int] = info["state"].get("subjects") or {}
            for subject, number in page.items():
                job = (row.matches(subject) or {}).get("job")
                if job is not None:
                    held = found.setdefault(job, {})
                    held[row.name] = held.get(row.name, 0) + number
            offset += len(page)
            if not page or offset >= int(info.get("total", 0)):
                break
    return found
