"""Uvicorn's connections at the HTTP door: what each tells of itself, so that it has a deadline."""

from __future__ import annotations

import asyncio
from typing import Any

from entities.http_server.connection_limits import LATE, LONG, ConnectionBounds, OpenConnections

HEAD_BYTES = 64 << 10
"""Of a request's head. The parser in C has no limit of its own."""
REST_BYTES = 4 << 20
"""Of a body that was refused, so that the refusal arrives: more is cut off."""


def with_deadlines(protocol: type[Any], connections: OpenConnections) -> type[Any]:
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
                connections.end(self, "length")

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

        def lateness(self, now: float, bounds: ConnectionBounds) -> str:
            """Why it is to be cut off, of one that is asking or being answered; empty where it is in time."""
            if self._held_at:
                return "answer" if now - self._held_at > bounds.answer_s else ""
            if self._is_owing() or not self.cycle.more_body:
                return ""
            if self.flow.read_paused:  # we are the slow ones
                self._asked_at += now - self._looked_at
                self._last_at = now
            self._looked_at = now
            if now - self._last_at > bounds.body_s:
                return "body"
            allowed_s = bounds.body_s + self._came / bounds.body_bytes_per_s
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
