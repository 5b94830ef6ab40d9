"""The tap: decodes anything on any subject by the table, without the mesh noticing.

It listens as anyone may: plain core NATS, no queue group, no answers. What it can't take in time is dropped
here and counted; nobody ever waits for it. Requests are seen on their subjects; with `replies` their
answers, too, found among the inboxes by the id that they answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import msgpack
from nats.aio.msg import Msg
from pydantic import ValidationError

from bus import codec, subjects, tap_pattern
from bus.connection import Bus
from bus.link import Feed
from bus.subjects import Subject
from bus.tap_filter import Filter, tree_of
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadInput, BadMessage

INBOXES = "_INBOX.>"
REQUESTS_REMEMBERED = 10_000
"""Requests whose answers are recognised: seen last, whatever their subject."""
SUBJECTS_COUNTED = 10_000
"""Different subjects per second of which rates are kept; the rest count as `(more)`."""


@dataclass(frozen=True, slots=True)
class Tapped:
    """One message as seen. `problem` says why `message` is None; `note` what a bare key-value mark means."""

    at: float
    subject: str
    row: Subject | None
    tokens: dict[str, str]
    envelope: Envelope | None
    message: Message | None
    raw: bytes = field(repr=False)
    problem: str = ""
    note: str = ""
    answers: str = ""
    """For a reply: the subject of the request."""
    latency_ms: float | None = None
    """For a reply: since the request was seen here."""

    def tree(self) -> dict[str, Any]:
        """All fields as plain values, for filters and JSON; bearer tokens masked."""
        return tree_of(self.subject, self.row, self.tokens, self.envelope, self.message)


@dataclass(frozen=True, slots=True)
class Rate:
    """Messages and bytes a second of one subject (or row) over the tap's window."""

    name: str
    per_s: float
    bytes_per_s: float
    total: int


@dataclass(slots=True)
class _Arrived:
    at: float
    subject: str
    data: bytes
    operation: str


class Tap:
    """`async with Tap(bus, ["signal.>"]) as tap: async for tapped in tap: …`

    Args:
        bus: any connection; its sender is never used.
        patterns: as typed by a person, see `tap_pattern.complete`; seen once even if several match.
        filters: `field=value` expressions that must all be met, see `tap_filter.Filter`.
        replies: also the answers to requests on these subjects.
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
        limit: int = 10_000,
        window_s: float = 5.0,
    ) -> None:
        if limit < 1 or window_s < 1:
            raise BadInput("tap: limit must be at least 1 message, window_s at least 1 second")
        self.patterns = tuple(dict.fromkeys(tap_pattern.complete(pattern) for pattern in patterns))
        self.rows = [
            row
            for row in subjects.SUBJECTS
            if any(tap_pattern.overlap(p, row.wildcard()) for p in self.patterns)
        ]
        self.filters = [Filter.parse(text) for text in filters]
        for condition in self.filters:
            condition.check(self.rows)
        self.seen = 0
        """Messages received, dropped ones included."""
        self._dropped = 0
        self._bus = bus
        self._replies = replies
        self._limit = limit
        self._window_s = window_s
        self._feeds: list[Feed] = []
        self._waiting: deque[_Arrived] = deque()
        self._news = asyncio.Event()
        self._asked: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._totals: Counter[str] = Counter()
        self._seconds: deque[tuple[int, Counter[str], Counter[str]]] = deque()
        self._started = time.time()

    @property
    def dropped(self) -> int:
        """Messages that came faster than they were looked at."""
        return self._dropped

    async def __aenter__(self) -> Self:
        self._started = time.time()
        wanted = [*self.patterns, *([INBOXES] if self._replies and INBOXES not in self.patterns else [])]
        try:
            for index, pattern in enumerate(wanted):
                self._feeds.append(
                    await self._bus.link.subscribe(
                        pattern,
                        self._callback(wanted[:index]),
                        pending_limit=self._limit,
                        on_drop=self._lost,
                    )
                )
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def __aiter__(self) -> AsyncGenerator[Tapped, None]:
        return self._items()

    async def _items(self) -> AsyncGenerator[Tapped, None]:
        looked = 0
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            tapped = self._look(self._waiting.popleft())
            if tapped is not None and self._wanted(tapped):
                yield tapped
            looked += 1
            if looked % 64 == 0:
                await asyncio.sleep(0)  # decoding a flood must leave the loop some air

    def rates(self, *, by_row: bool = True, now: float | None = None) -> list[Rate]:
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
        found = [Rate(name, rows[name] / span, bytes_of[name] / span, totals[name]) for name in totals]
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
            self._arrive(_Arrived(time.time(), message.subject, message.data, operation))

        return arrive

    def _arrive(self, arrived: _Arrived) -> None:
        if arrived.subject.startswith("_INBOX.") and not arrived.data:
            return  # flow control of the clients, not a message
        self.seen += 1
        self._count(arrived)
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self._lost()
        self._waiting.append(arrived)
        self._news.set()

    def _lost(self) -> None:
        self._dropped += 1

    def _count(self, arrived: _Arrived) -> None:
        second = int(arrived.at)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter(), Counter()))
            while self._seconds[0][0] < second - self._window_s:
                self._seconds.popleft()
        known = arrived.subject in self._totals or len(self._totals) < SUBJECTS_COUNTED
        name = "_INBOX" if arrived.subject.startswith("_INBOX.") else arrived.subject if known else "(more)"
        self._totals[name] += 1
        self._seconds[-1][1][name] += 1
        self._seconds[-1][2][name] += len(arrived.data)

    # --- looking at -----------------------------------------------------------------------------------------
    def _look(self, arrived: _Arrived) -> Tapped | None:
        tapped = decode(arrived.subject, arrived.data, at=arrived.at, operation=arrived.operation)
        if arrived.subject.startswith("_INBOX."):
            return self._as_reply(tapped)
        if (
            self._replies
            and tapped.envelope is not None
            and tapped.row is not None
            and tapped.row.reply is not None
        ):
            self._asked.setdefault(tapped.envelope.id, (tapped.subject, tapped.at))  # repeats keep the first
            while len(self._asked) > REQUESTS_REMEMBERED:
                self._asked.popitem(last=False)
        return tapped

    def _as_reply(self, tapped: Tapped) -> Tapped | None:
        """An answer to a request that was seen; other inbox traffic only if that was asked for."""
        cause = tapped.envelope.causation if tapped.envelope is not None else None
        asked = self._asked.get(cause) if cause is not None else None
        if asked is None:
            return tapped if any(pattern.startswith("_INBOX") for pattern in self.patterns) else None
        subject, at = asked
        row, tokens = subjects.lookup(subject) or (None, {})
        return replace(tapped, row=row, tokens=tokens, answers=subject, latency_ms=1e3 * (tapped.at - at))

    def _wanted(self, tapped: Tapped) -> bool:
        if not self.filters:
            return True
        tree = tapped.tree()
        return all(condition.meets(tree) for condition in self.filters)

    async def _close(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            await self._bus.link.unsubscribe(feed)


def decode(subject: str, data: bytes, *, at: float, operation: str = "") -> Tapped:
    """One message by the table. Never raises: what can't be read has `problem`."""
    found = subjects.lookup(subject)
    row, tokens = found if found is not None else (None, {})
    if not data and (operation or (row is not None and row.bucket is not None)):
        marks = {"DEL": "deleted", "PURGE": "deleted", "MaxAge": "expired"}
        return Tapped(
            at, subject, row, tokens, None, None, data, note=marks.get(operation, operation or "deleted")
        )
    try:
        message, envelope = codec.decode(data, None if row is None else row.schema)
    except BadMessage as error:
        return Tapped(at, subject, row, tokens, _envelope(data), None, data, problem=error.text)
    return Tapped(at, subject, row, tokens, envelope, message, data)


def _envelope(data: bytes) -> Envelope | None:
    """The envelope of a message whose body is unusable, if at least that can be read."""
    try:
        return Envelope.model_validate(msgpack.unpackb(data, strict_map_key=False), extra="ignore")
    except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
        return None


def _row_name(subject: str) -> str:
    if subject in ("_INBOX", "(more)"):
        return "replies" if subject == "_INBOX" else subject
    found = subjects.lookup(subject)
    return found[0].name if found is not None else tap_pattern.short(subject)
