"""A run's record: the messages of one job from all streams, in the order of the server's clock.

The record has everything that functional modules take in, what they suggested, what was decided, and the
outcome: each row that a stream keeps, except log lines, dead letters, unreadable records and the audit. Rows
that name a job are read for that job; rows of the whole mesh (signals, node samples) for the time that the
job ran. Of what modules have learnt, the last state before the job is in it as well.
`bus.messaging.stream_specs` says how long the streams keep messages.
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
from bus.subject_row import Subject
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import NotFound, Unavailable
from schemas.job import ENDED, JobEvent

RECORDED: tuple[Subject, ...] = tuple(
    row
    for row in subjects.SUBJECTS
    if row.stream not in (None, "LOGS", "DEAD_LETTERS", "UNREADABLE", "AUDIT", "GENERATIONS")
    if row is not subjects.USE_REPORT
)
"""The rows of a run's record; what services answered, and whom, is nobody's record."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One recorded message as it was sent. `at_ns` is when the server stored it, in ns since the epoch."""

    row: Subject
    at_ns: int
    subject: str
    data: bytes

    @property
    def at(self) -> float:
        """When the server stored it, in seconds since the epoch."""
        return self.at_ns / NANO

    def open(self) -> tuple[Message, Envelope]:
        """The decoded message and its envelope.

        Raises:
            BadMessage: see `codec.decode`.
        """
        return codec.decode(self.data, self.row.schema)


@dataclass(frozen=True, slots=True)
class RunSpan:
    """When a job ran, by its first and its last event, in seconds since the epoch.

    `until` is infinite while the job has not ended; `last` is its last event so far.
    """

    began: float
    until: float
    last: float
    ended: bool


async def read_run(
    bus: Bus, job: str, span: RunSpan, *, before_s: float = 12.0, after_s: float = 5.0
) -> AsyncGenerator[Frame, None]:
    """Yields everything recorded of a job, oldest first; memory is bounded by one batch per row.

    Args:
        bus: The connection.
        job: The job.
        span: When it ran.
        before_s: Seconds before the job for which its record includes rows of the whole mesh. They cover one
            period of the registry's full state (10 s), so that a module that starts with the record knows the
            members.
        after_s: Seconds after a job's last event, for decisions and reports that follow it.

    Raises:
        Unavailable: the bus was lost meanwhile and did not come back.
    """
    sources = [_source(bus, row, job, span, before_s, after_s) for row in RECORDED]
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
    """Takes the next frame of a source into the heap.

    Of two messages of the same nanosecond, that of the earlier row comes first, so the order is always the
    same.
    """
    with contextlib.suppress(StopAsyncIteration):
        frame = await anext(source)
        heapq.heappush(waiting, (frame.at_ns, rank, frame))


async def _source(
    bus: Bus, row: Subject, job: str, span: RunSpan, before_s: float, after_s: float
) -> AsyncGenerator[Frame, None]:
    """Yields one row's frames. The server removes a consumer that is idle for a minute; a new one goes on."""
    assert row.stream is not None
    is_of_job = "job" in row.tokens
    pattern = row.wildcard(job=job) if is_of_job else row.wildcard()
    begins = span.began - (after_s if is_of_job else before_s)
    if row is subjects.LEARNT_STATE:
        for item in await _last_before(bus, row, begins):
            yield Frame(row, int(begins * NANO), item.subject, item.data)
    until = span.until + after_s
    position: int | None = None
    failures = 0
    while True:
        place: dict[str, Any] = {"since": begins} if position is None else {"start": position}
        try:
            async with (
                OrderedConsumer.open(bus.connection, row.stream, pattern, **place) as reader,
                contextlib.aclosing(reader.present()) as items,
            ):
                async for item in items:
                    if item.at > until:
                        return
                    position = item.sequence + 1
                    failures = 0
                    if is_of_job or _concerns(item, job):
                        yield Frame(row, item.at_ns, item.subject, item.data)
            return
        except NotFound:
            return  # there is no such stream, or an older version made it without this row
        except Unavailable:
            failures += 1
            if bus.connection.closing or failures > 3:
                raise
        await asyncio.sleep(bus.connection.times.retry_s)
        await bus.connection.wait_online()


async def _last_before(bus: Bus, row: Subject, at: float) -> list[StreamMessage]:
    """The last message of each module's version on this row before this time, in order."""
    assert row.stream is not None
    last: dict[tuple[str, Any], StreamMessage] = {}
    with contextlib.suppress(NotFound):
        async with (
            OrderedConsumer.open(bus.connection, row.stream, row.wildcard(), start=1) as reader,
            contextlib.aclosing(reader.present()) as items,
        ):
            async for item in items:
                if item.at >= at:
                    break
                body = codec.peek(item.data).get("body")
                version = body.get("version") if isinstance(body, Mapping) else None
                last[item.subject, version] = item
    return sorted(last.values(), key=lambda item: item.sequence)


def _concerns(item: StreamMessage, job: str) -> bool:
    """Whether a message of a mesh-wide row is about this job or about no particular job."""
    body = codec.peek(item.data).get("body")
    return not isinstance(body, Mapping) or body.get("job", None) in (None, job)


async def span_of(bus: Bus, job: str) -> RunSpan:
    """When a job ran.

    Raises:
        NotFound: the streams hold nothing (any more) of this job.
    """
    row = subjects.JOB_EVENT
    assert row.stream is not None
    last = await jetstream.last(bus.connection, row.stream, row(job=job), leader=False)
    if last is None:
        raise NotFound(f"nothing is recorded of a job {job}: `dmsc runs recorded` shows what is", job=job)
    async with (
        OrderedConsumer.open(bus.connection, row.stream, row(job=job), start=1) as reader,
        contextlib.aclosing(reader.present()) as items,
    ):
        first = await anext(items, last)
    message, _ = codec.decode(last.data, row.schema)
    ended = isinstance(message, JobEvent) and message.state in ENDED
    return RunSpan(first.at, last.at if ended else math.inf, last.at, ended)


async def counts(bus: Bus) -> dict[str, dict[str, int]]:
    """The number of messages in the streams per job and row, without reading any of them."""
    counts_by_job: dict[str, dict[str, int]] = {}
    for row in RECORDED:
        if "job" not in row.tokens or row.stream is None:
            continue
        offset = 0
        while True:
            query = {"subjects_filter": row.wildcard(), "offset": offset}
            try:
                info = await jetstream.call(bus.connection, f"STREAM.INFO.{row.stream}", query)
            except NotFound:
                break
            page: dict[str, int] = info["state"].get("subjects") or {}
            for subject, number in page.items():
                job = (row.matches(subject) or {}).get("job")
                if job is not None:
                    job_counts = counts_by_job.setdefault(job, {})
                    job_counts[row.name] = job_counts.get(row.name, 0) + number
            offset += len(page)
            if not page or offset >= int(info.get("total", 0)):
                break
    return counts_by_job
