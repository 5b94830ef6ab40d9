"""Kind `feed`: records that users push, while the job trains too (ADR-0064).

In the order of arrival a position has its record for ever, whether the feed is open or closed when it is
drawn. Where the end must be known (shuffled, in a mixture, an evaluation set), the feed has to be closed when
the job is analysed. Pieces are fetched when they are needed, and kept in the source's folder.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bus.connection import Bus
from bus.files.feed_rows import FeedRows, find_feed
from bus.subjects import FEED_PIECE
from bus.wire.request_progress import moved
from schemas.errors import BadData, NotFound, Unavailable, UnreadableRecord
from schemas.feeds import FeedField, FeedPiece, FeedPieceData, FeedRecord, standing
from schemas.job import JobSpec
from schemas.job_file.data import SourceSpec
from workers.data.permutation import Permutation
from workers.data.samples import Opening

ENDLESS = 1 << 40
"""The samples of a feed in the order of arrival, as orders count them."""
STAND_IN = "a record that is not there yet"
"""The text of records with which a job is measured before there are any."""
LINES_KEPT = 16
"""Pieces whose lines stay in memory."""


@dataclass(frozen=True, kw_only=True)
class FeedConfig:
    """How a feed is read."""

    kept_bytes: int = 256 << 20
    """Most bytes of an arriving feed's pieces on this disk; what is needed again is fetched again."""
    again_s: float = 1.0
    """Pause before the bus is asked again, which is away."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the samples of a job follow from the records of an arriving feed. Pure.

    Attributes:
        seed: The job's `training.seed`.
        window: See `data.shuffle_window`.
        stops: Whether the job ends with the feed.
    """

    seed: int
    window: int
    stops: bool

    def record(self, position: int, count: int, *, closed: bool) -> int:
        """The record at a position whose records are there (`standing`)."""
        epoch, inside = divmod(position, count) if closed else (0, position)
        if self.window < 2:
            return inside
        number = inside // self.window
        first = number * self.window
        size = min(self.window, count - first) if closed else self.window
        return first + _permuted(size, self.seed, epoch, number, inside - first)


@functools.lru_cache(maxsize=8)
def _order(size: int, seed: int, epoch: int, number: int) -> tuple[int, ...]:
    order = Permutation(size, seed, "feed", epoch, number)
    return tuple(order(np.arange(size, dtype=np.int64)).tolist())


def _permuted(size: int, seed: int, epoch: int, number: int, inside: int) -> int:
    return _order(size, seed, epoch, number)[inside]


class OpenFeed:
    """One feed that a process reads: its rows, followed by events, and its pieces in a folder.

    Args:
        bus: The connection; it outlives this.
        at: Its key in the job file.
        record: The feed.
        rows: Its rows; entered.
        folder: Where its pieces go.
        arrival: Of an arriving feed; None: it is closed, and read whole.
        stand_ins: Whether records are made up to measure with, but for the first `measured` of a job.
    """

    def __init__(
        self,
        bus: Bus,
        at: str,
        record: FeedRecord,
        rows: FeedRows,
        folder: Path,
        arrival: Arrival | None,
        *,
        stand_ins: bool,
        config: FeedConfig = FeedConfig(),
    ) -> None:
        self.at = at
        self.record = record
        self.rows = rows
        self.arrival = arrival
        self.stand_ins = stand_ins
        self.measured = 0
        self.size = ENDLESS if arrival is not None else rows.count
        self._config = config
        self._bucket = bus.bucket(FEED_PIECE)
        self._loop = asyncio.get_running_loop()
        self._folder = folder
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._firsts: list[int] = []
        self._pieces: list[FeedPiece] = []
        self._known = 0
        self._lock = asyncio.Lock()
        self._placing = threading.Lock()
        self.lines = functools.lru_cache(maxsize=LINES_KEPT)(self._lines)

    # --- on the loop ----------------------------------------------------------------------------------------
    async def until(self, position: int) -> bool:
        """Waits until the samples before a position are there; False: they never will be.

        Raises:
            BadData: The feed was deleted, or is damaged.
        """
        arrival, rows = self.arrival, self.rows
        assert arrival is not None
        while True:
            self._check()
            state = standing(position, arrival.window, rows.count, closed=rows.closed, stops=arrival.stops)
            if state != "waits":
                return state == "there"
            await rows.until_news()

    async def fetch(self, records: Iterable[int]) -> None:
        """Fetches the pieces of these records."""
        for piece in {self._place(record)[1].digest: None for record in records}:
            await self.piece(piece)

    async def piece(self, digest: str) -> bytes:
        """The bytes of a piece, from the folder or from the bus.

        Raises:
            BadData: It is gone, or not what was stored.
        """
        async with self._lock:
            path = self._folder / digest
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return await asyncio.to_thread(path.read_bytes)
            data = await self._fetched(digest)
            await asyncio.to_thread(path.write_bytes, data)
            self._kept[digest] = len(data)
            while self.arrival is not None and sum(self._kept.values()) > self._config.kept_bytes:
                old, _ = self._kept.popitem(last=False)
                (self._folder / old).unlink(missing_ok=True)
            return data

    async def _fetched(self, digest: str) -> bytes:
        name = self.record.name
        while True:
            try:
                entry = await self._bucket.get(leader=True, uid=self.record.uid, digest=digest)
                break
            except UnreadableRecord:
                raise BadData(f"{self.at}: feed {name} is damaged: records of it can't be read") from None
            except Unavailable:
                await asyncio.sleep(self._config.again_s)
        if entry is None or not isinstance(entry.message, FeedPieceData):
            self._check()
            raise BadData(f"{self.at}: records of feed {name} are gone: was it deleted?")
        data = entry.message.data
        moved(len(data))
        if hashlib.sha256(data).hexdigest() != digest:
            raise BadData(f"{self.at}: feed {name} is damaged: records of it are not as they were pushed")
        return data

    def _check(self) -> None:
        if self.rows.broken:
            raise BadData(f"{self.at}: {self.rows.broken}")

    # --- on any thread --------------------------------------------------------------------------------------
    def there(self, position: int) -> bool:
        """Whether the sample at a position can be drawn."""
        arrival, rows = self.arrival, self.rows
        if arrival is None:
            return True
        state = standing(position + 1, arrival.window, rows.count, closed=rows.closed, stops=arrival.stops)
        return state == "there"

    def record_at(self, position: int) -> int:
        arrival, rows = self.arrival, self.rows
        return position if arrival is None else arrival.record(position, rows.count, closed=rows.closed)

    def line(self, record: int) -> bytes:
        """The record as it is kept."""
        first, piece = self._place(record)
        return self.lines(piece.digest)[record - first]

    def _place(self, record: int) -> tuple[int, FeedPiece]:
        """The piece of a record, and its first record."""
        with self._placing:  # the loop and the thread that makes batches both ask
            return self._placed(record)

    def _placed(self, record: int) -> tuple[int, FeedPiece]:
        while not self._firsts or record >= self._firsts[-1] + self._pieces[-1].records:
            segment = self.rows.segments[self._known]
            first = segment.first
            for piece in segment.pieces:
                self._pieces.append(piece)
                self._firsts.append(first)
                first += piece.records
            self._known += 1
        place = bisect.bisect_right(self._firsts, record) - 1
        return self._firsts[place], self._pieces[place]

    def _lines(self, digest: str) -> list[bytes]:
        path = self._folder / digest
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # never fetched, or others came since
            data = asyncio.run_coroutine_threadsafe(self.piece(digest), self._loop).result()
        return data.splitlines()


class FeedSamples:
    """The records of a feed as samples."""

    def __init__(self, feed: OpenFeed) -> None:
        self._feed = feed
        fields = ", ".join(f"{name}={field}" for name, field in feed.record.fields.items())
        identity = ["feed", feed.record.uid, fields]
        if feed.arrival is None:
            identity.append(str(feed.size))
        self.digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()

    def __len__(self) -> int:
        return self._feed.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        feed, fields = self._feed, self._feed.record.fields
        if feed.stand_ins and feed.arrival is not None and index >= feed.measured:
            return {name: _stand_in(field) for name, field in fields.items()}
        values = json.loads(feed.line(feed.record_at(index)))
        return {name: _value(values[name], field) for name, field in fields.items()}

    def close(self) -> None:
        """Nothing: the rows are followed as long as the connection lasts."""
        self._feed.lines.cache_clear()


def _value(value: Any, field: FeedField) -> Any:
    if field.dtype == "text":
        return value
    if field.dtype == "bfloat16":
        return torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16)
    return torch.from_numpy(np.array(value, dtype=field.dtype).reshape(field.shape))


def _stand_in(field: FeedField) -> Any:
    if field.dtype == "text":
        return STAND_IN
    return torch.zeros(field.shape, dtype=getattr(torch, field.dtype))


async def follow_arrival(spec: JobSpec, bus: Bus) -> OpenFeed | None:
    """The feed whose records a job takes as they arrive, to wait for them only; None: there is none.

    Raises:
        BadData: It is not there.
    """
    name = spec.data.arriving
    if name is None:
        return None
    record, rows = await _found(bus, "data", name)
    arrival = Arrival(spec.training.seed, spec.data.shuffle_window, spec.ends_with_feed)
    return OpenFeed(bus, "data.feed", record, rows, Path(), arrival, stand_ins=False)


async def _found(bus: Bus, place: str, name: str) -> tuple[FeedRecord, FeedRows]:
    try:
        record = await find_feed(bus, name)
    except (NotFound, UnreadableRecord) as error:
        raise BadData(f"{place}.feed: {error.text}") from None
    return record, await FeedRows(bus, record.name, record.uid).__aenter__()


async def open_feeds(spec: JobSpec, bus: Bus | None, folder: Path, *, stand_ins: bool) -> dict[str, OpenFeed]:
    """Opens each feed that a job names: key in the job file → feed.

    Of a feed that is read whole all pieces are fetched, of an arriving one those of the first microbatch.

    Raises:
        BadData: One is not there, is open although its end must be known, or can't be read.
    """
    found: dict[str, OpenFeed] = {}
    for number, (place, part) in enumerate(spec.data.places().items()):
        if part.kind != "feed" or part.feed is None:
            continue
        if bus is None:
            raise BadData(f"{place}.feed: {part.feed} is at a mesh, and there is no connection to one")
        record, rows = await _found(bus, place, part.feed)
        arrives = place == "data" and spec.data.arriving is not None
        if not arrives and not rows.closed:
            raise BadData(
                f"{place}.feed: {part.feed} is open, and its end must be known here: close it, or train on "
                "it alone in the order of arrival"
            )
        arrival = (
            Arrival(spec.training.seed, spec.data.shuffle_window, spec.ends_with_feed) if arrives else None
        )
        own = folder / f"feed-{number}"
        own.mkdir()
        feed = OpenFeed(bus, f"{place}.feed", record, rows, own, arrival, stand_ins=stand_ins)
        needed = range(spec.training.microbatch_samples if arrives else rows.count)
        if not arrives or feed.there(needed[-1]):
            await feed.fetch([feed.record_at(position) for position in needed])
            feed.measured = len(needed)
        found[place] = feed
    return found


def open_feed(spec: SourceSpec, opening: Opening) -> FeedSamples:
    """The samples of a feed that was opened by `open_feeds`."""
    feed = opening.feeds.get(opening.at)
    if feed is None:
        raise BadData(f"{opening.at}.feed: {spec.feed} is at a mesh, and there is no connection to one")
    assert isinstance(feed, OpenFeed)
    return FeedSamples(feed)
