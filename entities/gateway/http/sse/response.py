"""An event stream as an HTTP answer, at its client's own pace; it ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from types import MappingProxyType
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.http.sse.format import refused_record
from entities.gateway.http.sse.hub import EventHub

Allowed = Callable[[Callable[[str], None]], AbstractContextManager[None]]

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

    The constructor raises `RateLimited` or `Overloaded`: then the client still gets a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        facts: RequestFacts,
        hub: EventHub,
        allowed: Allowed,
        pieces: AsyncGenerator[bytes, None],
        status_code: int = 200,  # FastAPI reads it here for the OpenAPI document
        *,
        own_headers: Mapping[str, str] = MappingProxyType({}),
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """`allowed` takes a callback, and calls it with the reason once the client's permission ends.

        `over` is called once nobody reads any more, also where no piece was read.
        """
        super().__init__(status_code=status_code)
        self._own_headers = [(name.encode(), value.encode()) for name, value in own_headers.items()]
        self._over = over
        self._facts = facts
        self._allowed = allowed
        self._pieces = pieces
        self._room = hub.admitted(facts.identity)
        self._room.__enter__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._facts.is_stream = True
        refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def refuse(why: str) -> None:
            if not refused.done():
                refused.set_result(why)

        disconnect = asyncio.create_task(wait_disconnect(receive))
        sending: asyncio.Task[None] | None = None
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._own_headers]}
            )
            with self._allowed(refuse):
                sending = asyncio.create_task(self._send(send), name=f"events {scope['path']}")
                outcomes: set[asyncio.Future[Any]] = {sending, disconnect, refused}
                await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            if refused.done() and not sending.done():
                await _finish(sending)
                sending = asyncio.create_task(_send_refusal(send, refused.result()))
                await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._room.__exit__(None, None, None)
            failure = None if sending is None else await _finish(sending)
            self._over()
            await _finish(disconnect)
        if failure is not None and not isinstance(failure, OSError):
            raise failure

    async def _send(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _send_refusal(send: Send, why: str) -> None:
    await send({"type": "http.response.body", "body": refused_record(why)})


async def _finish(task: asyncio.Task[None]) -> Exception | None:
    """Cancels the task if it still runs; returns its exception, if any."""
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome if isinstance(outcome, Exception) else None


async def wait_disconnect(receive: Receive) -> None:
    """Returns once the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
