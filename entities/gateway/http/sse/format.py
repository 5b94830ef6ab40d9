"""Server-sent events: what a record of a stream looks like to a client, and where a client begins. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from bus.messaging.streams import StreamRecord
from schemas.fault import FaultRecord
from schemas.job import ENDED, JobEvent


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """How events are streamed to HTTP clients."""

    keepalive_s: float = 15.0  # a comment line while nothing happens, below the usual proxies' 60 s
    tail_s: float = 1.0  # how long to wait for the last event of a job whose record says it ended
    kept_lines: int = 1024  # of a feed, for all that follow it; who is behind these has lagged
    kept_bytes: int = 2 << 20  # … and so many bytes at most
    read_lines: int = 256  # of the past, read at once for one client
    read_bytes: int = 256 << 10  # … and so many bytes at most
    readers: int = 8  # clients whose past is read at the same time
    woken: int = 16  # clients served in a row before others get their turn
    streams: int = 4_000  # open at one gateway; beyond it 503
    streams_each: int = 200  # of one identity; beyond it 429

    def __post_init__(self) -> None:
        if self.read_lines > self.kept_lines or self.read_bytes > self.kept_bytes:
            raise ValueError("a feed must keep at least what is read at once")


@dataclass(frozen=True, slots=True)
class EventLine:
    """One record as it goes to clients. `last`: nothing follows it."""

    sequence: int
    data: bytes
    last: bool = False


def job_line(recorded: StreamRecord) -> EventLine | None:
    event = recorded.message
    if not isinstance(event, JobEvent):
        return None
    data = sse_record(recorded.sequence, event.kind, event.model_dump_json(exclude_none=True))
    return EventLine(recorded.sequence, data, event.state in ENDED)


def fault_line(recorded: StreamRecord) -> EventLine | None:
    fault = recorded.message
    if not isinstance(fault, FaultRecord):
        return None
    return EventLine(
        recorded.sequence,
        sse_record(recorded.sequence, "fault", fault.model_dump_json(exclude_none=True)),
    )


def sse_record(sequence: int, event: str, data: str) -> bytes:
    """One record: `id` is the stream sequence, `data` JSON in one line."""
    return f"id: {sequence}\nevent: {event}\ndata: {data}\n\n".encode()


def lagged(position: int) -> bytes:
    """The last thing that a client hears which read too slowly: everything up to `position` it has."""
    said = json.dumps({"last": position, "detail": "read too slowly; come back with Last-Event-ID"})
    return f"event: lagged\ndata: {said}\n\n".encode()


def closing() -> bytes:
    """The last thing that clients hear of a gateway that stops; `retry` sends browsers back soon."""
    said = json.dumps({"detail": "this gateway stops; come back with Last-Event-ID, also at another"})
    return f"retry: 200\nevent: closing\ndata: {said}\n\n".encode()


def refused_record(why: str) -> bytes:
    """The last thing that a client hears whose token counts no more, or who may read no more."""
    return f"event: refused\ndata: {json.dumps({'detail': why})}\n\n".encode()


def first_sequence(start: int | None, last_event_id: str | None) -> int:
    """Where to begin: after `Last-Event-ID` if the client came back with one, else at `start`, else at 1."""
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        return int(last_event_id[:18]) + 1
    return max(1, start or 1)
