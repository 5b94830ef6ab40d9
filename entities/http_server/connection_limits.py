"""Limits of an HTTP server's connections: their number, their deadlines, and which one is closed first.

Any client that reaches the port may open connections and send nothing, half a head or half a body. So a
connection that owes a request or the rest of a body has a deadline, and so has one that does not read its
answer. At most `ConnectionBounds.waiting` connections may owe a request: beyond it the one that has waited
longest is closed, so that a new connection always finds room, however many idle ones there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from entities.metrics import HTTP_CONNECTIONS, HTTP_CUT, MetricReading

LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class ConnectionBounds:
    """Limits of one server's connections."""

    connections: int = 6_000  # open at once; further ones are closed at once
    waiting: int = 1_024  # of these, the ones that owe a request; beyond it the longest-waiting is closed
    head_s: float = 15.0  # from a connection's start, or the answer before, to the end of a request's head
    body_s: float = 30.0  # without a byte of an incomplete body
    body_bytes_per_s: float = 1_024.0  # least average rate of a body
    answer_s: float = 60.0  # without the client reading its answer
    sweep_s: float = 1.0  # interval between checks of all connections; deadlines are this precise
    handshake_s: float = 10.0  # of TLS
    accept_again_s: float = 0.1  # pause after a failed accept
    log_every_s: float = 1.0  # least time between two log lines about failed accepts

    def __post_init__(self) -> None:
        if not 1 <= self.waiting <= self.connections:
            raise ValueError("waiting must be at least 1, and not above connections")
        if min(self.head_s, self.body_s, self.answer_s, self.body_bytes_per_s) <= 0:
            raise ValueError("head_s, body_s, answer_s and body_bytes_per_s must be above 0")


class ClientConnection(Protocol):
    """What the limits need of a connection's protocol."""

    def lateness(self, now: float, bounds: ConnectionBounds) -> str:
        """Why a busy connection (requesting or being answered) is to be closed; empty if it is in time."""

    def is_sending(self) -> bool:
        """Whether a part of its answer waits for the client to read."""

    def cut(self, why: str) -> None:
        """Close it; `why` is `room`, `head`, `body`, `answer` or `length`."""


class OpenConnections:
    """All open connections of one server. It checks deadlines while there are any; loop time, seconds."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self.cut: Counter[str] = Counter()
        self._waiting: dict[ClientConnection, float] = {}  # owing a request → since when, the longest first
        self._busy: set[ClientConnection] = set()  # requesting or being answered
        self._handshakes: dict[asyncio.Task[None], None] = {}  # in a TLS handshake
        self._next_sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy) + len(self._handshakes)

    # --- who comes, and goes -------------------------------------------------------------------------------
    def make_room(self) -> bool:
        """Make room for a new connection; False if too many are open and all of them are busy."""
        waiting = len(self._waiting) + len(self._handshakes)
        if waiting >= self.bounds.waiting or (waiting and len(self) >= self.bounds.connections):
            self.end_oldest()
        return len(self) < self.bounds.connections

    def end_oldest(self) -> None:
        """Close the connection that has owed a request for longest, if there is one."""
        if len(self._handshakes) > len(self._waiting):
            task = next(iter(self._handshakes))
            del self._handshakes[task]
            task.cancel()
            self.cut["room"] += 1
        elif self._waiting:
            self.end(next(iter(self._waiting)), "room")

    def greets(self, task: asyncio.Task[None]) -> None:
        """Count a connection whose handshake `task` is under way."""
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def owes(self, connection: ClientConnection) -> None:
        """Note that a connection is new or was answered, and owes its next request."""
        loop = asyncio.get_running_loop()
        self._busy.discard(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = loop.time()
        if self._next_sweep is None:
            self._next_sweep = loop.call_later(self.bounds.sweep_s, self._sweep)

    def asks(self, connection: ClientConnection) -> None:
        """Note that the head of a request has arrived."""
        if self._waiting.pop(connection, None) is not None:
            self._busy.add(connection)

    def ended(self, connection: ClientConnection) -> None:
        self._waiting.pop(connection, None)
        self._busy.discard(connection)

    def close(self) -> None:
        """Stop checks and handshakes; the server itself ends the open connections."""
        if self._next_sweep is not None:
            self._next_sweep.cancel()
            self._next_sweep = None
        for task in tuple(self._handshakes):
            task.cancel()

    # --- deadlines -----------------------------------------------------------------------------------------
    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now, bounds = loop.time(), self.bounds
        for connection, since in tuple(self._waiting.items()):
            if now - since <= bounds.head_s:
                break  # the others have waited less
            if not connection.is_sending():
                self.end(connection, "head")
            elif now - since > bounds.answer_s:
                self.end(connection, "answer")
        for connection in tuple(self._busy):
            why = connection.lateness(now, bounds)
            if why:
                self.end(connection, why)
        remaining = self._waiting or self._busy
        self._next_sweep = loop.call_later(self.bounds.sweep_s, self._sweep) if remaining else None

    def end(self, connection: ClientConnection, why: str) -> None:
        self.cut[why] += 1
        self.ended(connection)
        connection.cut(why)

    def readings(self, gateway: str) -> Iterator[MetricReading]:
        """The metrics of these connections."""
        yield HTTP_CONNECTIONS(len(self), gateway=gateway)
        for reason, count in self.cut.items():
            yield HTTP_CUT(count, gateway=gateway, reason=reason)
