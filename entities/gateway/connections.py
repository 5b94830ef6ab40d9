"""Connections at the HTTP door: how many, how long each may take to ask and to read, and who goes first.

Whoever may reach the port may open connections and say nothing, half a head or half a body on them. So a
connection that owes a request, or the rest of a body, has a deadline, and so has one that does not read its
answer. Of those that owe a request there are at most `DoorConfig.waiting`: beyond it the one that has waited
longest goes, so that a newcomer always finds room, however many strangers there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bus.logs import get_logger
from entities.gateway.door_config import DoorConfig
from entities.metrics import HTTP_CONNECTIONS, HTTP_CUT, Reading

log = get_logger("door")

SWEEP_S = 1.0
"""Between two looks at all connections; a deadline is kept to within this."""
HEAD_BYTES = 64 << 10
"""Of a request's head. The parser in C has no limit of its own."""
REST_BYTES = 4 << 20
"""Of a body that was refused, so that the refusal arrives: more is cut off."""
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connections:
    """All that are open at one door. Runs its own sweep while there are any; loop time, seconds."""

    def __init__(self, config: DoorConfig) -> None:
        self.config = config
        self.cut: Counter[str] = Counter()
        self._waiting: dict[Any, float] = {}  # owe a request → since when, the longest first
        self._busy: set[Any] = set()  # are asking or being answered
        self._greeting: dict[asyncio.Task[None], None] = {}  # in a TLS handshake
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy) + len(self._greeting)

    # --- who comes, and goes -------------------------------------------------------------------------------
    def make_room(self) -> bool:
        """For a newcomer. False: all that are open are being answered, and there are too many of them."""
        owing = len(self._waiting) + len(self._greeting)
        if owing >= self.config.waiting or (owing and len(self) >= self.config.connections):
            self.end_oldest()
        return len(self) < self.config.connections

    def end_oldest(self) -> None:
        """Of those that owe a request; nothing where there are none."""
        if len(self._greeting) > len(self._waiting):
            task = next(iter(self._greeting))
            del self._greeting[task]
            task.cancel()
            self.cut["room"] += 1
        elif self._waiting:
            self._end(next(iter(self._waiting)), "room")

    def greets(self, task: asyncio.Task[None]) -> None:
        """Until it is done this connection is in nobody's hands but `task`'s."""
        self._greeting[task] = None
        task.add_done_callback(lambda done: self._greeting.pop(done, None))

    def owes(self, connection: Any) -> None:
        """It is new, or was answered: the next request is to come."""
        loop = asyncio.get_running_loop()
        self._busy.discard(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = loop.time()
        if self._sweeping is None:
            self._sweeping = loop.call_later(SWEEP_S, self._sweep)

    def asks(self, connection: Any) -> None:
        """A request's head has come."""
        if self._waiting.pop(connection, None) is not None:
            self._busy.add(connection)

    def ended(self, connection: Any) -> None:
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
        now, config = loop.time(), self.config
        for connection, since in tuple(self._waiting.items()):
            if now - since <= config.head_s:
                break  # the others have waited less
            if not connection.is_sending():
                self._end(connection, "head")
            elif now - since > config.answer_s:
                self._end(connection, "answer")
        for connection in tuple(self._busy):
            why = connection.lateness(now, config)
            if why:
                self._end(connection, why)
        left = self._waiting or self._busy
        self._sweeping = loop.call_later(SWEEP_S, self._sweep) if left else None

    def _end(self, connection: Any, why: str) -> None:
        self.cut[why] += 1
        self.ended(connection)
        connection.cut(why)

    def readings(self, gateway: str) -> Iterator[Reading]:
        """For whoever scrapes this process."""
        yield HTTP_CONNECTIONS(len(self), gateway=gateway)
        for reason, count in self.cut.items():
            yield HTTP_CUT(count, gateway=gateway, reason=reason)


def with_deadlines(protocol: type[Any], connections: Connections) -> type[Any]:
    """`protocol`, uvicorn's for HTTP/1.1, that tells `connections` what it is at."""

    class Bounded(protocol):  # type: ignore[misc]  # whichever parser there is
        _came = 0  # bytes since it began to owe a request, or the body that is being read
        _asked_at = 0.0
        _last_at = 0.0
        _held_at = 0.0  # since when it does not read what we have written
        _looked_at = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            connections.owes(self)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.ended(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_idle = self._is_owing()
            self._came += len(data)
            super().data_received(data)
            if not self._is_owing():
                self._last_at = self.loop.time()
                if was_idle:
                    self._asked_at = self._looked_at = self._last_at
                    self._came = 0
                    connections.asks(self)
            elif was_idle and self._came > (REST_BYTES if self.cycle is not None else HEAD_BYTES):
                connections._end(self, "length")

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_owing() and not self.transport.is_closing():
                self.answered()

        def answered(self) -> None:
            """The next request has its full time."""
            self._came = 0
            connections.owes(self)

        def pause_writing(self) -> None:
            self._held_at = self.loop.time()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._held_at = 0.0
            super().resume_writing()

        def _is_owing(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def lateness(self, now: float, config: DoorConfig) -> str:
            """Why it is to be cut off, of one that is asking or being answered; empty where it is in time."""
            if self._held_at:
                return "answer" if now - self._held_at > config.answer_s else ""
            if self._is_owing() or not self.cycle.more_body:
                return ""
            if self.flow.read_paused:  # we are the slow ones
                self._asked_at += now - self._looked_at
                self._last_at = now
            self._looked_at = now
            if now - self._last_at > config.body_s:
                return "body"
            allowed_s = config.body_s + self._came / config.body_bytes_per_s
            return "body" if now - self._asked_at > allowed_s else ""

        def is_sending(self) -> bool:
            """Whether a part of its answer waits until it reads."""
            return bool(self.transport.get_write_buffer_size())

        def cut(self, why: str) -> None:
            """A farewell where one can be sent without waiting for anybody."""
            if why in ("room", "answer", "body") or self.scheme == "https" or self.is_sending():
                self.transport.abort()
                return
            if self.cycle is None and self._came:  # it said something: it hears why
                self.transport.write(LONG if why == "length" else LATE)
            self.transport.close()

    return Bounded
