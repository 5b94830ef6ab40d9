"""Deadlines of uvicorn's connections: each reports its state to `OpenConnections`, which closes late ones."""

from __future__ import annotations

import asyncio
from typing import Any

from entities.http_server.connection_limits import LATE, LONG, ConnectionBounds, OpenConnections

HEAD_BYTES = 64 << 10
"""The most bytes of a request's head. The parser in C has no limit of its own."""
REST_BYTES = 4 << 20
"""The most bytes of a refused body that are still read, so that the refusal arrives."""


def with_deadlines(protocol: type[Any], connections: OpenConnections) -> type[Any]:
    """A subclass of `protocol`, uvicorn's HTTP/1.1 protocol, that reports its state to `connections`."""

    class Bounded(protocol):  # type: ignore[misc]  # whichever parser there is
        _received = 0  # bytes received since the client began to owe a request, or of the body being read
        _request_at = 0.0  # when its request began; moved on by our own pauses in reading
        _last_at = 0.0  # when its last bytes came
        _paused_at = 0.0  # since when the client does not read what we have written; 0: it reads
        _checked_at = 0.0  # when `lateness` was last called

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            connections.owes(self)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.ended(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_idle = self._is_owing()
            self._received += len(data)
            super().data_received(data)
            if not self._is_owing():
                self._last_at = self.loop.time()
                if was_idle:
                    self._request_at = self._checked_at = self._last_at
                    self._received = 0
                    connections.asks(self)
            elif was_idle and self._received > (REST_BYTES if self.cycle is not None else HEAD_BYTES):
                connections.end(self, "length")

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_owing() and not self.transport.is_closing():
                self.answered()

        def answered(self) -> None:
            """Starts the deadline of the next request."""
            self._received = 0
            connections.owes(self)

        def pause_writing(self) -> None:
            self._paused_at = self.loop.time()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._paused_at = 0.0
            super().resume_writing()

        def _is_owing(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def lateness(self, now: float, bounds: ConnectionBounds) -> str:
            """Why this connection must be closed (`answer` or `body`); empty while it is in time."""
            if self._paused_at:
                return "answer" if now - self._paused_at > bounds.answer_s else ""
            if self._is_owing() or not self.cycle.more_body:
                return ""
            if self.flow.read_paused:  # the delay is ours, not the client's
                self._request_at += now - self._checked_at
                self._last_at = now
            self._checked_at = now
            if now - self._last_at > bounds.body_s:
                return "body"
            allowed_s = bounds.body_s + self._received / bounds.body_bytes_per_s
            return "body" if now - self._request_at > allowed_s else ""

        def is_sending(self) -> bool:
            """Whether a part of an answer still waits for the client to read it."""
            return bool(self.transport.get_write_buffer_size())

        def cut(self, why: str) -> None:
            """Closes the connection, with a last answer if that can be sent without waiting."""
            if why in ("room", "answer", "body") or self.scheme == "https" or self.is_sending():
                self.transport.abort()
                return
            if self.cycle is None and self._received:  # the client has begun a request: it gets the reason
                self.transport.write(LONG if why == "length" else LATE)
            self.transport.close()

    return Bounded
