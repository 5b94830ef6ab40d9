"""An event stream as an HTTP answer: its client's pace is its own, and its leaving is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from entities.gateway.admission import Facts
from entities.gateway.event_feed import EventHub

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "records with id (sequence in the stream), event (kind) and data (JSON), for ever or "
        "until the job has ended; `lagged` and `closing` end a stream that can be taken up again",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
"""A route's `responses`."""


class EventStream(Response):
    """Sends pieces as they come; each waits until the connection has taken the one before.

    Raises `RateLimited` or `Overloaded` when it is made, while an error can still be answered.
    """

    media_type = "text/event-stream"

    def __init__(
        self, facts: Facts, hub: EventHub, pieces: AsyncGenerator[bytes, None], status_code: int = 200
    ) -> None:
        super().__init__(status_code=status_code)
        self._facts = facts
        self._pieces = pieces
        self._room = hub.admitted(facts.identity)
        self._room.__enter__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._facts.is_stream = True
        sending = asyncio.create_task(self._send(send), name=f"events {scope['path']}")
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._room.__exit__(None, None, None)
            for task in (sending, leaving):
                task.cancel()
            outcomes = await asyncio.gather(sending, leaving, return_exceptions=True)
        if isinstance(outcomes[0], Exception) and not isinstance(outcomes[0], OSError):
            raise outcomes[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
