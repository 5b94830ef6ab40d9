"""The live tap: decodes messages on any subject by the table, without the mesh noticing.

It uses plain core NATS subscriptions, no queue group and no answers. Messages that it can't take in time are
dropped here and counted; nobody ever waits for it. It sees requests on their subjects; with `replies` it also
sees their answers, which it finds among the inboxes by the id of the request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from nats.aio.msg import Msg

from bus import subjects
from bus.connection import Bus
from bus.nats.client import DurableSubscription
from bus.tap import pattern as tap_pattern
from bus.tap.decoder import INBOX, TapDecoder
from bus.tap.message import RawMessage, TappedMessage
from schemas.errors import BadInput

SUBJECTS_COUNTED = 10_000
"""Most subjects for which rates are kept; the rest count as `(more)`."""


@dataclass(frozen=True, slots=True)
class SubjectRate:
    """Messages and bytes per second of one subject or row over the tap's window."""

    name: str
    per_s: float
    bytes_per_s: float
    total: int


class Tap:
    """`async with Tap(bus, ["signal.>"]) as tap: async for tapped in tap: …`

    Args:
        bus: Any connection; nothing is sent over it.
        patterns: As typed by a person, see `bus.tap.pattern.complete`; a message that several match is shown
            once.
        filters: `field=value` expressions that must all be met, see `bus.tap.filter.Filter`.
        replies: Show also the answers to requests on these subjects.
        sample, may: See `bus.tap.decoder.TapDecoder`.
        limit: Most messages that wait to be decoded; beyond it the oldest are dropped and counted.
        window_s: Seconds over which rates are averaged.

    Raises:
        BadInput: a pattern matches none of our subjects, or a filter names a field that no message has.
    """

    def __init__(
        self,
        bus: Bus,
        patterns: Sequence[str] = (">",),
        *,
        filters: Sequence[str] = (),
        replies: bool = False,
        sample: float | None = None,
        may: Callable[[str], bool] | None = None,
        limit: int = 10_000,
        window_s: float = 5.0,
    ) -> None:
        if limit < 1 or window_s < 1:
            raise BadInput("tap: limit must be at least 1 message, window_s at least 1 second")
        self.decoder = TapDecoder(patterns, filters=filters, replies=replies, sample=sample, may=may)
        self.seen = 0
        """Messages received, dropped ones included."""
        self._dropped = 0
        self._bus = bus
        self._limit = limit
        self._window_s = window_s
        self._subscriptions: list[DurableSubscription] = []
        self._waiting: deque[RawMessage] = deque()
        self._not_empty = asyncio.Event()
        self._totals: Counter[str] = Counter()
        self._seconds: deque[tuple[int, Counter[str], Counter[str]]] = deque()
        self._started = time.time()

    @property
    def dropped(self) -> int:
        """Messages that came faster than they were consumed."""
        return self._dropped

    async def __aenter__(self) -> Self:
        self._started = time.time()
        patterns = self.decoder.subscriptions()
        try:
            subscribing = (self._listen(pattern, patterns[:index]) for index, pattern in enumerate(patterns))
            outcomes = await asyncio.gather(*subscribing, return_exceptions=True)
            for error in outcomes:
                if error is not None:
                    raise error
        except BaseException:
            await self._close()
            raise
        return self

    async def _listen(self, pattern: str, earlier: Sequence[str]) -> None:
        subscription = await self._bus.connection.subscribe(
            pattern, self._callback(earlier), pending_limit=self._limit, on_drop=self._on_drop
        )
        self._subscriptions.append(subscription)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def __aiter__(self) -> AsyncGenerator[TappedMessage, None]:
        return self._items()

    async def _items(self) -> AsyncGenerator[TappedMessage, None]:
        decoded = 0
        while True:
            while not self._waiting:
                self._not_empty.clear()
                await self._not_empty.wait()
            for tapped in self.decoder.look(self._waiting.popleft()):
                yield tapped
            decoded += 1
            if decoded % 64 == 0:
                await asyncio.sleep(0)  # decoding a flood must not starve the event loop

    def rates(self, *, by_row: bool = True, now: float | None = None) -> list[SubjectRate]:
        """Rates over the window, busiest first, by row of the table or by concrete subject."""
        now = time.time() if now is None else now
        span = min(self._window_s, max(1.0, now - self._started))
        messages: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for second, counted, summed in self._seconds:
            if now - second <= self._window_s:
                messages += counted
                sizes += summed
        rows: Counter[str] = Counter()
        bytes_of: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for subject, total in self._totals.items():
            name = _row_name(subject) if by_row else tap_pattern.short(subject)
            totals[name] += total
            rows[name] += messages[subject]
            bytes_of[name] += sizes[subject]
        rates = [SubjectRate(name, rows[name] / span, bytes_of[name] / span, totals[name]) for name in totals]
        return sorted(rates, key=lambda rate: (-rate.per_s, rate.name))

    # --- arriving -----------------------------------------------------------------------------------------
    def _callback(self, earlier: Sequence[str]) -> Any:
        """A callback that ignores messages which an earlier pattern matches as well."""

        async def on_message(message: Msg) -> None:
            if any(tap_pattern.matches(pattern, message.subject) for pattern in earlier):
                return
            operation = (message.headers or {}).get("KV-Operation", "") or (message.headers or {}).get(
                "Nats-Marker-Reason", ""
            )
            self._arrive(RawMessage(time.time(), message.subject, message.data, operation))

        return on_message

    def _arrive(self, raw: RawMessage) -> None:
        if raw.subject.startswith(INBOX) and not raw.data:
            return  # flow control of the clients, not a message
        if not self.decoder.allows(raw.subject):
            return
        self.seen += 1
        self._count(raw)
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self._on_drop()
        self._waiting.append(raw)
        self._not_empty.set()

    def _on_drop(self) -> None:
        self._dropped += 1

    def _count(self, raw: RawMessage) -> None:
        second = int(raw.at)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter(), Counter()))
            while self._seconds[0][0] < second - self._window_s:
                self._seconds.popleft()
        is_counted = raw.subject in self._totals or len(self._totals) < SUBJECTS_COUNTED
        name = "_INBOX" if raw.subject.startswith(INBOX) else raw.subject if is_counted else "(more)"
        self._totals[name] += 1
        self._seconds[-1][1][name] += 1
        self._seconds[-1][2][name] += len(raw.data)

    async def _close(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await self._bus.connection.unsubscribe(subscription)


def _row_name(subject: str) -> str:
    if subject in ("_INBOX", "(more)"):
        return "replies" if subject == "_INBOX" else subject
    match = subjects.lookup(subject)
    return match[0].name if match is not None else tap_pattern.short(subject)
