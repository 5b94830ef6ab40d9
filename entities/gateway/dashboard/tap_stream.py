"""The tap in a browser: decoded messages that the user's role may see, without secrets, at a readable rate.

On a guarded bus it subscribes over a connection of the user's own, made with the browser's token. So the NATS
server itself enforces the user's role, and the tap can receive what the gateway has no right to, such as
answers. Only operators and admins get answers (inboxes); the `ready` event says so to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from bus.connection import Bus
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from bus.tap.rendering import as_json, render
from bus.tap.scope import may, shown
from bus.tasks import cancel
from entities.gateway.server_sent_events import KEEPALIVE, encode_event
from schemas.envelope import EntityKind
from schemas.errors import Unavailable
from schemas.gateway_api import TapScope

TAPS = 16
"""Taps of one gateway at a time; each has subscriptions of its own."""
DECODED = 400
"""Messages that are decoded between two batches, at most."""


@dataclass(frozen=True, kw_only=True)
class TapConfig:
    """Limits of a tap. Overflow: of more than `per_batch` messages in `every_s`, the oldest are dropped.

    Dropped messages are counted.
    """

    every_s: float = 0.25
    per_batch: int = 60
    pending: int = 2000
    body_chars: int = 20_000  # of one message's JSON; a longer message is sent without its body
    keepalive_s: float = 15.0


class TapSessions:
    """Opens taps for browsers, at most `TAPS` at a time."""

    def __init__(self, bus: Bus, config: TapConfig | None = None) -> None:
        self.config = config or TapConfig()
        self._bus = bus
        self._open = 0

    async def stream(
        self,
        patterns: Sequence[str],
        filters: Sequence[str],
        replies: bool,
        scope: TapScope,
        token: str,
    ) -> AsyncGenerator[bytes, None]:
        """Batches of messages as server-sent events, until the client disconnects.

        The first event, `ready`, states that the subscriptions are in place. Errors are raised before it.

        Raises:
            BadInput: a pattern or a filter that can match nothing.
            Refused: the bus does not accept the token.
            Unavailable: too many taps are open here, or the bus is away.
        """
        if self._open >= TAPS:
            raise Unavailable(f"{TAPS} tap through this gateway already; close one, or use another gateway")
        answers = scope.everything or not self._bus.connection.guarded
        self._open += 1
        try:
            async with self._connection(token) as bus:
                tap = Tap(
                    bus,
                    shown(scope, patterns),
                    filters=filters,
                    replies=replies and answers,
                    may=may(scope),
                    limit=self.config.pending,
                )
                async with tap:
                    yield encode_event(
                        "ready",
                        {
                            "patterns": patterns,
                            "hidden": scope.hidden,
                            "answers": answers,
                            "role": scope.role,
                        },
                    )
                    async for event in self._events(tap):
                        yield event
        finally:
            self._open -= 1

    def _connection(self, token: str) -> contextlib.AbstractAsyncContextManager[Bus]:
        """The connection for the tap's subscriptions."""
        if not self._bus.connection.guarded:
            return contextlib.nullcontext(self._bus)
        return self._bus.beside(name="tap", kind=EntityKind.TAP, token=token)

    async def _events(self, tap: Tap) -> AsyncGenerator[bytes, None]:
        config = self.config
        waiting: deque[TappedMessage] = deque(maxlen=config.per_batch)
        decoded = 0
        turn = asyncio.Event()

        async def read() -> None:
            nonlocal decoded
            async with contextlib.aclosing(tap.__aiter__()) as items:
                async for tapped in items:
                    waiting.append(tapped)
                    decoded += 1
                    if decoded % DECODED == 0:  # wait: the tap then drops the excess before it costs anything
                        turn.clear()
                        await turn.wait()

        reader = asyncio.create_task(read())
        quiet, shown = 0.0, 0
        try:
            while not reader.done():
                await asyncio.sleep(config.every_s)
                batch = [_shown(tapped, config.body_chars) for tapped in waiting]
                waiting.clear()
                turn.set()
                shown += len(batch)
                skipped = decoded - shown
                if batch:
                    quiet = 0.0
                    data = {"messages": batch, "seen": tap.seen, "dropped": tap.dropped + skipped}
                    yield encode_event("messages", data)
                elif (quiet := quiet + config.every_s) >= config.keepalive_s:
                    quiet = 0.0
                    yield KEEPALIVE
        finally:
            await cancel(reader)


def _shown(tapped: TappedMessage, body_chars: int) -> dict[str, Any]:
    line = render(tapped)
    text = as_json(tapped)
    return {
        "at": round(tapped.at, 3),
        "sender": line.sender,
        "subject": line.subject,
        "what": line.what,
        "summary": line.summary,
        "tone": line.tone,
        "message": json.loads(text)
        if len(text) <= body_chars
        else {"note": f"{len(text):,} characters of JSON"},
    }
