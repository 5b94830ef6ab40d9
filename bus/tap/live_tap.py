"""The tap: decodes anything on any subject by the table, without the mesh noticing.

It listens as anyone may: plain core NATS, no queue group, no answers. What it can't take in time is dropped
here and counted; nobody ever waits for it. Requests are seen on their subjects; with `replies` their
answers, too, found among the inboxes by the id that they answer.
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
"""Different subjects per second of which rates are kept; the rest count as `(more)`."""


@dataclass(frozen=True, slots=True)
class SubjectRate:
    """Messages and bytes a second of one subject (or row) over the tap's window."""

    name: str
    per_s: float
    bytes_per_s: float
    total: int


class Tap:
    """`async with Tap(bus, ["signal.>"]) as tap: async for tapped in tap: …`

    Args:
        bus: any connection; its sender is never used.
        patterns: as typed by a person, see `tap_pattern.complete`; seen once even if several match.
        filters: `field=value` expressions that must all be met, see `tap_filter.Filter`.
        replies: also the answers to requests on these subjects.
        sample, may: see `tap_lens.Lens`.
        limit: messages that may wait to be looked at; beyond it the oldest are dropped and counted.
        window_s: seconds over which rates are taken.

    Raises:
        BadInput: a pattern that matches nothing of ours, or a filter on a field that nothing has.
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
        self.lens = TapDecoder(patterns, filters=filters, replies=replies, sample=sample, may=may)
        self.seen = 0
        """Messages received, dropped ones included."""
        self._dropped = 0
        self._bus = bus
        self._limit = limit
        self._window_s = window_s
        self._feeds: list[DurableSubscription] = []
        self._waiting: deque[RawMessage] = deque()
        self._news = asyncio.Event()
        self._totals: Counter[str] = Counter()
        self._seconds: deque[tuple[int, Counter[str], Counter[str]]] = deque()
        self._started = time.time()

    @property
    def dropped(self) -> int:
        """Messages that came faster than they were looked at."""
        return self._dropped

    async def __aenter__(self) -> Self:
        self._started = time.time()
        wanted = self.lens.subscriptions()
        try:
            listening = (self._listen(pattern, wanted[:index]) for index, pattern in enumerate(wanted))
            refused = await asyncio.gather(*listening, return_exceptions=True)
            for error in refused:
                if error is not None:
                    raise error
        except BaseException:
            await self._close()
            raise
        return self

    async def _listen(self, pattern: str, earlier: Sequence[str]) -> None:
        feed = await self._bus.link.subscribe(
            pattern, self._callback(earlier), pending_limit=self._limit, on_drop=self._lost
        )
        self._feeds.append(feed)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def __aiter__(self) -> AsyncGenerator[TappedMessage, None]:
        return self._items()

    async def _items(self) -> AsyncGenerator[TappedMessage, None]:
        looked = 0
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            tapped = self.lens.look(self._waiting.popleft())
            if tapped is not None:
                yield tapped
            looked += 1
            if looked % 64 == 0:
                await asyncio.sleep(0)  # decoding a flood must leave the loop some air

    def rates(self, *, by_row: bool = True, now: float | None = None) -> list[SubjectRate]:
        """Rates over the window, busiest first; by row of the table, or by concrete subject."""
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
        found = [SubjectRate(name, rows[name] / span, bytes_of[name] / span, totals[name]) for name in totals]
        return sorted(found, key=lambda rate: (-rate.per_s, rate.name))

    # --- arriving -----------------------------------------------------------------------------------------
    def _callback(self, earlier: Sequence[str]) -> Any:
        """A message that an earlier pattern has brought as well is left to that one."""

        async def arrive(message: Msg) -> None:
            if any(tap_pattern.matches(pattern, message.subject) for pattern in earlier):
                return
            operation = (message.headers or {}).get("KV-Operation", "") or (message.headers or {}).get(
                "Nats-Marker-Reason", ""
            )
            self._arrive(RawMessage(time.time(), message.subject, message.data, operation))

        return arrive

    def _arrive(self, arrived: RawMessage) -> None:
        if arrived.subject.startswith(INBOX) and not arrived.data:
            return  # flow control of the clients, not a message
        if not self.lens.allows(arrived.subject):
            return
        self.seen += 1
        self._count(arrived)
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self._lost()
        self._waiting.append(arrived)
        self._news.set()

    def _lost(self) -> None:
        self._dropped += 1

    def _count(self, arrived: RawMessage) -> None:
        second = int(arrived.at)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter(), Counter()))
            while self._seconds[0][0] < second - self._window_s:
                self._seconds.popleft()
        known = arrived.subject in self._totals or len(self._totals) < SUBJECTS_COUNTED
        name = "_INBOX" if arrived.subject.startswith(INBOX) else arrived.subject if known else "(more)"
        self._totals[name] += 1
        self._seconds[-1][1][name] += 1
        self._seconds[-1][2][name] += len(arrived.data)

    async def _close(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            await self._bus.link.unsubscribe(feed)


def _row_name(subject: str) -> str:
    if subject in ("_INBOX", "(more)"):
        return "replies" if subject == "_INBOX" else subject
    found = subjects.lookup(subject)
    return found[0].name if found is not None else tap_pattern.short(subject)
