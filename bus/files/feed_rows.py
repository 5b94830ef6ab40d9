"""A feed's manifest as whoever follows it sees it: rows in order, each change by an event (ADR-0064)."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Awaitable
from types import TracebackType

from bus.connection import Bus
from bus.messaging.key_value import Change, Watch
from bus.nats import jetstream
from bus.subjects import FEED, FEED_SEGMENT
from bus.wire import codec
from schemas.errors import BadMessage, NotFound, UnreadableRecord
from schemas.feeds import FeedRecord, FeedSegment


async def find_feed(bus: Bus, name: str) -> FeedRecord:
    """The feed of this name.

    Raises:
        NotFound: There is none.
        UnreadableRecord, NewerRecord, Unavailable: Its row can't be read.
    """
    entry = await bus.bucket(FEED).get(leader=True, feed=name)
    if entry is None or not isinstance(entry.message, FeedRecord):
        raise NotFound(f"there is no feed {name}; `dmsc data create {name} FIELD=TYPE` makes one")
    return entry.message


async def last_row(bus: Bus, name: str, uid: str) -> FeedSegment | None:
    """The row of a feed that was written last, which tells of all before it; None: it has none.

    Raises:
        UnreadableRecord: It can't be read.
    """
    subject = FEED_SEGMENT.wildcard(uid=uid)
    item = await jetstream.last(bus.connection, f"KV_{FEED_SEGMENT.bucket}", subject, leader=True)
    if item is None or item.is_marker:
        return None
    try:
        message, _ = codec.decode(item.data, FEED_SEGMENT.schema)
    except BadMessage as error:
        raise UnreadableRecord(f"feed {name} is damaged: its last row can't be read ({error.text})") from None
    return message if isinstance(message, FeedSegment) else None


class FeedRows:
    """The rows of one feed, as an async context.

    Attributes:
        segments: In order of number; only ever appended to.
        closed: Whether no more records will come.
        broken: Why its records can't be relied on any more, in one line; empty: they can.
    """

    def __init__(self, bus: Bus, name: str, uid: str) -> None:
        self.name, self.uid = name, uid
        self.segments: list[FeedSegment] = []
        self.closed = False
        self.broken = ""
        self._firsts: list[int] = []
        self._bucket = bus.bucket(FEED_SEGMENT)
        self._watch: Watch | None = None
        self._current = asyncio.Event()
        self._news = asyncio.Event()

    async def __aenter__(self) -> FeedRows:
        self._watch = await self._bucket.watch(self._changed, mend=self._unreadable, uid=self.uid)
        await self._current.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the watch. Twice is fine."""
        if self._watch is not None:
            await self._watch.stop()

    @property
    def count(self) -> int:
        """Records that are there."""
        return self.segments[-1].after if self.segments else 0

    def until_news(self) -> Awaitable[object]:
        """Waits until something has changed since this call, and not since it is awaited."""
        return self._news.wait()

    def segment_of(self, record: int) -> FeedSegment:
        """The segment that holds a record below `count`."""
        return self.segments[bisect.bisect_right(self._firsts, record) - 1]

    async def _changed(self, change: Change) -> None:
        if not change.key:
            self._current.set()
        elif not isinstance(change.message, FeedSegment):
            self._break(f"feed {self.name} was deleted")
        else:
            self._take(change.message)
        self._news.set()
        self._news = asyncio.Event()

    def _take(self, segment: FeedSegment) -> None:
        if segment.end == "removed":
            self._break(f"feed {self.name} was deleted")
        elif segment.number == len(self.segments) and segment.first == self.count:
            self.closed = segment.end == "closed"
            self.segments.append(segment)
            self._firsts.append(segment.first)
        elif segment.number >= len(self.segments):
            self._break(f"feed {self.name} is damaged: push {len(self.segments)} is not in its manifest")

    async def _unreadable(self, key: str, revision: int) -> None:
        number = key.rpartition(".")[2]
        self._break(f"feed {self.name} is damaged: the row of push {number} can't be read")
        self._news.set()
        self._news = asyncio.Event()

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
