"""Connections at a door: how many, how long each may take to ask and to read, and who goes first.

Whoever may reach the port may open connections and say nothing, half a head or half a body on them. So a
connection that owes a request, or the rest of a body, has a deadline, and so has one that does not read its
answer. Of those that owe a request there are at most `ConnectionBounds.waiting`: beyond it the one that has
waited longest goes, so that a newcomer always finds room, however many strangers there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from entities.metrics import HTTP_CONNECTIONS, HTTP_CUT, MetricReading

SWEEP_S = 1.0
"""Between two looks at all connections; a deadline is kept to within this."""
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class ConnectionBounds:
    """Of a door's connections."""

    connections: int = 6_000  # open at once; whoever comes beyond them finds the door shut
    waiting: int = 1_024  # of these, such as owe a request; beyond it the one that has waited longest goes
    head_s: float = 15.0  # from a connection's begin, or the answer before, until a request's head is there
    body_s: float = 30.0  # without a byte of a body that is not complete
    body_bytes_per_s: float = 1_024.0  # … and the least rate on the whole
    answer_s: float = 60.0  # without reading an answer that waits

    def __post_init__(self) -> None:
        if not 1 <= self.waiting <= self.connections:
            raise ValueError("waiting must be at least 1, and not above connections")
        if min(self.head_s, self.body_s, self.answer_s, self.body_bytes_per_s) <= 0:
            raise ValueError("head_s, body_s, answer_s and body_bytes_per_s must be above 0")


class ClientConnection(Protocol):
    """What a door's protocol tells of itself."""

    def lateness(self, now: float, bounds: ConnectionBounds) -> str:
        """Why it is to be cut off, of one that is asking or being answered; empty where it is in time."""

    def is_sending(self) -> bool:
        """Whether a part of its answer waits until it reads."""

    def cut(self, why: str) -> None:
        """Ends it: `room`, `head`, `body`, `answer` or `length`."""


class OpenConnections:
    """All that are open at one door. Runs its own sweep while there are any; loop time, seconds."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self.cut: Counter[str] = Counter()
        self._waiting: dict[ClientConnection, float] = {}  # owe a request → since when, the longest first
        self._busy: set[ClientConnection] = set()  # are asking or being answered
        self._greeting: dict[asyncio.Task[None], None] = {}  # in a TLS handshake
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy) + len(self._greeting)

    # --- who comes, and goes -------------------------------------------------------------------------------
    def make_room(self) -> bool:
        """For a newcomer. False: all that are open are being answered, and there are too many of them."""
        owing = len(self._waiting) + len(self._greeting)
        if owing >= self.bounds.waiting or (owing and len(self) >= self.bounds.connections):
            self.end_oldest()
        return len(self) < self.bounds.connections

    def end_oldest(self) -> None:
        """Of those that owe a request; nothing where there are none."""
        if len(self._greeting) > len(self._waiting):
            task = next(iter(self._greeting))
            del self._greeting[task]
            task.cancel()
            self.cut["room"] += 1
        elif self._waiting:
            self.end(next(iter(self._waiting)), "room")

    def greets(self, task: asyncio.Task[None]) -> None:
        """Until it is done this connection is in nobody's hands but `task`'s."""
        self._greeting[task] = None
        task.add_done_callback(lambda done: self._greeting.pop(done, None))

    def owes(self, connection: ClientConnection) -> None:
        """It is new, or was answered: the next request is to come."""
        loop = asyncio.get_running_loop()
        self._busy.discard(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = loop.time()
        if self._sweeping is None:
            self._sweeping = loop.call_later(SWEEP_S, self._sweep)

    def asks(self, connection: ClientConnection) -> None:
        """A request's head has come."""
        if self._waiting.pop(connection, None) is not None:
            self._busy.add(connection)

    def ended(self, connection: ClientConnection) -> None:
        self._waiting.pop(connection, None)
        self._busy.discard(connection)

    def close(self) -> None:
        """No more sweeps, no more handshakes; what is open is the server's to end."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for task in tuple(self._greeting):
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
        left = self._waiting or self._busy
        self._sweeping = loop.call_later(SWEEP_S, self._sweep) if left else None

    def end(self, connection: ClientConnection, why: str) -> None:
        self.cut[why] += 1
        self.ended(connection)
        connection.cut(why)

    def readings(self, gateway: str) -> Iterator[MetricReading]:
        """For whoever scrapes this process."""
        yield HTTP_CONNECTIONS(len(self), gateway=gateway)
        for reason, count in self.cut.items():
            yield HTTP_CUT(count, gateway=gateway, reason=reason)
