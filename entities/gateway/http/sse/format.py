"""Records and notices as server-sent events, and the sequence at which a client's stream begins. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messaging.streams import StreamRecord
from entities.gateway.server_sent_events import encode_event
from schemas.data_set.builds import BUILD_ENDED, BuildEvent
from schemas.fault import FaultRecord
from schemas.job import ENDED, JobEvent


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """How events are streamed to HTTP clients."""

    keepalive_s: float = 15.0  # a comment line while nothing happens, below the usual proxies' 60 s
    tail_s: float = 1.0  # how long to wait for the last event of a job whose record says it ended
    kept_lines: int = 1024  # last records of a subject kept for its followers; a client behind them lags
    kept_bytes: int = 2 << 20  # … and at most so many bytes of them
    read_lines: int = 256  # past records read at once for one client
    read_bytes: int = 256 << 10  # … and at most so many bytes of them
    readers: int = 8  # clients whose past is read at the same time
    woken: int = 16  # clients woken in a row before the event loop serves other requests
    streams: int = 4_000  # open at one gateway; beyond it 503
    streams_each: int = 200  # of one identity; beyond it 429

    def __post_init__(self) -> None:
        if self.read_lines > self.kept_lines or self.read_bytes > self.kept_bytes:
            raise ValueError("a hub must keep at least what is read at once")


@dataclass(frozen=True, slots=True)
class EventLine:
    """One record as it is sent to clients. `last`: no record follows it."""

    sequence: int
    data: bytes
    last: bool = False


def job_line(recorded: StreamRecord) -> EventLine | None:
    event = recorded.message
    if not isinstance(event, JobEvent):
        return None
    data = encode_event(event.kind, event.model_dump_json(exclude_none=True), recorded.sequence)
    return EventLine(recorded.sequence, data, event.state in ENDED)


def build_line(recorded: StreamRecord) -> EventLine | None:
    event = recorded.message
    if not isinstance(event, BuildEvent):
        return None
    data = encode_event(event.kind, event.model_dump_json(exclude_none=True), recorded.sequence)
    return EventLine(recorded.sequence, data, event.state in BUILD_ENDED)


def fault_line(recorded: StreamRecord) -> EventLine | None:
    fault = recorded.message
    if not isinstance(fault, FaultRecord):
        return None
    data = encode_event("fault", fault.model_dump_json(exclude_none=True), recorded.sequence)
    return EventLine(recorded.sequence, data)


def lagged(position: int) -> bytes:
    """The last event for a client that read too slowly: it has everything up to `position`."""
    detail = "read too slowly; come back with Last-Event-ID"
    return encode_event("lagged", {"last": position, "detail": detail})


def closing() -> bytes:
    """The last event from a gateway that stops; `retry` makes browsers reconnect soon (milliseconds)."""
    detail = "this gateway stops; come back with Last-Event-ID, also at another"
    return b"retry: 200\n" + encode_event("closing", {"detail": detail})


def refused_record(why: str) -> bytes:
    """The last event for a client whose token, or whose permission to read, has ended."""
    return encode_event("refused", {"detail": why})


def first_sequence(start: int | None, last_event_id: str | None) -> int:
    """The first sequence to send: after `Last-Event-ID` if there is one, else `start`, else 1."""
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        return int(last_event_id[:18]) + 1
    return max(1, start or 1)
