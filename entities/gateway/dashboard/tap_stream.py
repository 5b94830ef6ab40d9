"""The tap in a browser: what its role may see, decoded, secrets out, at a pace that a person bears."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from bus.connection import Bus
from bus.tap import Tap
from bus.tap_render import as_json, render
from bus.tap_scope import may
from bus.tapped import Tapped
from entities.gateway.dashboard.viewers import sse
from schemas.door import TapScope
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


class TapRooms:
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
    ) -> AsyncGenerator[bytes, None]:
        """Batches of messages as server-sent events until the client goes.

        The first event tells that it listens; before it:

        Raises:
            BadInput: a pattern or a filter that fits nothing.
            Unavailable: too many tap here, or the bus is away.
        """
        tap = Tap(
            self._bus, patterns, filters=filters, replies=replies, may=may(scope), limit=self.config.pending
        )
        if self._open >= TAPS:
            raise Unavailable(f"{TAPS} tap through this gateway already; close one, or use another gateway")
        self._open += 1
        try:
            async with tap:
                async for event in self._events(tap, scope):
                    yield event
        finally:
            self._open -= 1

    async def _events(self, tap: Tap, scope: TapScope) -> AsyncGenerator[bytes, None]:
        config = self.config
        waiting: deque[Tapped] = deque(maxlen=config.per_batch)
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
            yield sse("ready", {"patterns": tap.lens.patterns, "hidden": scope.hidden, "role": scope.role})
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


def _shown(tapped: Tapped, body_chars: int) -> dict[str, Any]:
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
