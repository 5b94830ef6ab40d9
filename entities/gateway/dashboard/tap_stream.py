"""The tap in a browser: what its role may see, decoded, secrets out, at a pace that a person bears.

On a guarded bus it listens over a connection of its user's own, made with the token that the browser shows.
So the server itself holds it to the user's role, and it hears what the gateway has no right to, as answers.
Inboxes are for operators and admins; others are told that they get none.
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
from entities.gateway.dashboard.viewers import sse
from schemas.door import TapScope
from schemas.envelope import EntityKind
from schemas.errors import Unavailable

TAPS = 16
"""Taps of one gateway at a time: each listens by itself."""
LOOKED = 400
"""Messages that are decoded between two batches, at most."""


@dataclass(frozen=True, kw_only=True)
class TapConfig:
    """Overflow rule: of more than `per_batch` within `every_s`, the oldest are dropped and counted."""

    every_s: float = 0.25
    per_batch: int = 60
    pending: int = 2000
    body_chars: int = 20_000  # of one message's JSON; a longer one is told without its body
    keepalive_s: float = 15.0


class TapSessions:
    """Counts who taps."""

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
        """Batches of messages as server-sent events until the client goes.

        The first event tells that it listens; before it:

        Raises:
            BadInput: a pattern or a filter that fits nothing.
            Refused: the bus does not accept the token.
            Unavailable: too many tap here, or the bus is away.
        """
        if self._open >= TAPS:
            raise Unavailable(f"{TAPS} tap through this gateway already; close one, or use another gateway")
        answers = scope.everything or not self._bus.link.guarded
        self._open += 1
        try:
            async with self._ears(token) as bus:
                tap = Tap(
                    bus,
                    shown(scope, patterns),
                    filters=filters,
                    replies=replies and answers,
                    may=may(scope),
                    limit=self.config.pending,
                )
                async with tap:
                    yield sse(
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

    def _ears(self, token: str) -> contextlib.AbstractAsyncContextManager[Bus]:
        """The connection that listens."""
        if not self._bus.link.guarded:
            return contextlib.nullcontext(self._bus)
        return self._bus.beside(name="tap", kind=EntityKind.TAP, token=token)

    async def _events(self, tap: Tap) -> AsyncGenerator[bytes, None]:
        config = self.config
        waiting: deque[TappedMessage] = deque(maxlen=config.per_batch)
        looked = 0
        turn = asyncio.Event()

        async def read() -> None:
            nonlocal looked
            async with contextlib.aclosing(tap.__aiter__()) as items:
                async for tapped in items:
                    waiting.append(tapped)
                    looked += 1
                    if looked % LOOKED == 0:  # the tap drops what is too much, before it costs anything
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
                skipped = looked - shown
                if batch:
                    quiet = 0.0
                    told = {"messages": batch, "seen": tap.seen, "dropped": tap.dropped + skipped}
                    yield sse("messages", told)
                elif (quiet := quiet + config.every_s) >= config.keepalive_s:
                    quiet = 0.0
                    yield b": listening\n\n"
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


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
