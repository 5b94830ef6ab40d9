"""A job's events, and faults, as server-sent events: replayed from the stream, then followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.streams import Recorded
from schemas.fault import FaultRecord
from schemas.job import ENDED, JobEvent


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """How events are streamed to HTTP clients."""

    keepalive_s: float = 15.0  # a comment line while nothing happens, below the usual proxies' 60 s
    tail_s: float = 1.0  # how long to wait for the last event of a job whose record says it ended
    buffered: int = 256  # events a slow client may lag behind what is read; then reading waits


async def job_events(
    bus: Bus, job: str, start: int, has_ended: Callable[[], Awaitable[bool]], config: EventsConfig
) -> AsyncIterator[bytes]:
    """Events from stream sequence `start` on, as SSE records. Ends with the job's last state."""
    queue: asyncio.Queue[Recorded | None] = asyncio.Queue(config.buffered)

    async def read() -> None:
        try:
            async for recorded in bus.history(subjects.JOB_EVENT, start=start, follow=True, job=job):
                await queue.put(recorded)
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        ended = await has_ended()
        yield b": events of " + job.encode() + b"\n\n"
        while True:
            try:
                async with asyncio.timeout(config.tail_s if ended else config.keepalive_s):
                    recorded = await queue.get()
            except TimeoutError:
                if ended:
                    return  # nothing more came, and nothing more will
                ended = await has_ended()
                yield b": waiting\n\n"
                continue
            if recorded is None:
                return  # the bus went away: the client comes back with Last-Event-ID
            event = recorded.message
            if not isinstance(event, JobEvent):
                continue
            yield sse_record(recorded.sequence, event)
            if event.state in ENDED:
                return
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def fault_records(bus: Bus, job: str | None, start: int, config: EventsConfig) -> AsyncIterator[bytes]:
    """Records of the fault queue from stream sequence `start` on, as SSE records; without an end."""
    queue: asyncio.Queue[Recorded | None] = asyncio.Queue(config.buffered)

    async def read() -> None:
        tokens: dict[str, Any] = {} if job is None else {"job": job}
        try:
            async for recorded in bus.history(subjects.FAULT_RECORD, start=start, follow=True, **tokens):
                await queue.put(recorded)
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        yield b": faults\n\n"
        while True:
            try:
                async with asyncio.timeout(config.keepalive_s):
                    recorded = await queue.get()
            except TimeoutError:
                yield b": waiting\n\n"
                continue
            if recorded is None:
                return  # the bus went away: the client comes back with Last-Event-ID
            if isinstance(recorded.message, FaultRecord):
                data = recorded.message.model_dump_json(exclude_none=True)
                yield f"id: {recorded.sequence}\nevent: fault\ndata: {data}\n\n".encode()
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def sse_record(sequence: int, event: JobEvent) -> bytes:
    """One record: `id` is the stream sequence, `event` the kind, `data` the event as JSON in one line."""
    data = event.model_dump_json(exclude_none=True)
    return f"id: {sequence}\nevent: {event.kind}\ndata: {data}\n\n".encode()


def first_sequence(start: int | None, last_event_id: str | None) -> int:
    """Where to begin: after `Last-Event-ID` if the client came back with one, else at `start`, else at 1."""
    if last_event_id is not None and last_event_id.isdigit():
        return int(last_event_id) + 1
    return max(1, start or 1)
