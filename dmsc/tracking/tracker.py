"""The tracker: follows the stream of job events, and hands what they tell to each sink.

Each sink has its own reader of the stream, so one that is away delays no other. Nothing piles up meanwhile:
the stream keeps the events (ADR-0052).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from dmsc.tracking.figures import PointFold, SystemFigures, TrackedPoint, tracked_run
from dmsc.tracking.sink import Sink, SinkAway
from schemas.envelope import Envelope
from schemas.errors import DmscError, Unavailable
from schemas.job import ENDED, JobEvent, JobRecord
from schemas.telemetry import InstanceSample

log = get_logger("tracker")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """The tracker's configuration."""

    batch_events: int = 500  # most events in one write to a sink
    batch_s: float = 0.5  # how long the first event of a batch waits for others
    open_jobs: int = 256  # runs open between batches; the one without events for longest is closed
    retry_s: float = 0.25  # until a request for a job's record is repeated
    away_s: float = 1.0  # before a sink that is away is asked again, at first; then twice as long …
    away_most_s: float = 30.0  # … up to this
    since: float | None = None  # jobs that were submitted before are not tracked; epoch seconds


class SinkFeed:
    """Feeds one sink with the events of all jobs, in order."""

    def __init__(self, bus: Bus | None, sink: Sink, system: SystemFigures, config: TrackerConfig) -> None:
        self._bus = bus
        self._sink = sink
        self._system = system
        self._config = config
        self._lock = threading.Lock()
        self._folds: dict[str, PointFold | None] = {}  # None: a job that is not tracked

    # --- the stream ---------------------------------------------------------------------------------------
    async def run(self, ready: asyncio.Event) -> None:
        """Follow the stream until cancelled."""
        assert self._bus is not None
        start = self._read_position() + 1
        waiting: asyncio.Queue[tuple[int, JobEvent]] = asyncio.Queue(self._config.batch_events)

        async def read() -> None:
            assert self._bus is not None
            async with aclosing(self._bus.history(subjects.JOB_EVENT, start=start, follow=True)) as events:
                ready.set()
                first = True
                async for recorded in events:
                    if first and start > 1 and recorded.sequence > start:
                        log.warning(
                            "events are gone from the stream", first=start, until=recorded.sequence - 1
                        )
                    first = False
                    assert isinstance(recorded.message, JobEvent)
                    await waiting.put((recorded.sequence, recorded.message))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while True:
                batch = await self._batch(waiting)
                await self.take(batch)
                self._write_position(batch[-1][0])

    async def _batch(self, waiting: asyncio.Queue[tuple[int, JobEvent]]) -> list[tuple[int, JobEvent]]:
        batch = [await waiting.get()]
        deadline = time.monotonic() + self._config.batch_s
        while len(batch) < self._config.batch_events:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    batch.append(await waiting.get())
            except TimeoutError:
                break
        return batch

    # --- events -------------------------------------------------------------------------------------------
    async def take(self, batch: Sequence[tuple[int, JobEvent]]) -> None:
        """Store these events; returns when the sink has them, however long it is away."""
        points: dict[str, list[TrackedPoint]] = {}
        for sequence, event in batch:
            fold = await self._fold(event.job)
            if fold is None:
                continue
            point = fold.take(sequence, event, self._system.of(event.job))
            if point is not None:
                points.setdefault(event.job, []).append(point)
                if point.rewound:
                    log.info("rolled back", job=event.job, step=point.step, sink=self._sink.name)
        for job, told in points.items():
            fold = self._folds[job]
            assert fold is not None
            await self._patiently(partial(self._sink.write, job, told, fold.position))
        await self._close_oldest()
        for _, event in batch:
            if event.kind == "state" and event.state in ENDED and event.job in self._folds:
                del self._folds[event.job]
                self._system.forget(event.job)
                await self._patiently(partial(self._sink.close, event.job))

    async def _fold(self, job: str) -> PointFold | None:
        if job in self._folds:
            self._folds[job] = self._folds.pop(job)  # the newest are at the end
            return self._folds[job]
        record = await self._record(job)
        since = self._config.since
        if since is not None and (record is None or record.submitted_at < since):
            self._folds[job] = None
        else:
            position = await self._patiently(partial(self._sink.begin, tracked_run(job, record)))
            self._folds[job] = PointFold(position)
        return self._folds[job]

    async def _close_oldest(self) -> None:
        """Closes runs beyond the bound; between batches, so that none is closed that has points to store."""
        while len(self._folds) > self._config.open_jobs:
            oldest = next(iter(self._folds))
            del self._folds[oldest]
            await self._patiently(partial(self._sink.close, oldest))

    async def _record(self, job: str) -> JobRecord | None:
        while self._bus is not None:
            try:
                entry = await self._bus.bucket(subjects.JOB_RECORD).get(job=job)
                return None if entry is None else entry.message
            except Unavailable:
                await asyncio.sleep(self._config.retry_s)
            except DmscError as error:
                log.warning("job tracked without its record", job=job, reason=error.text)
                break
        return None

    async def _patiently(self, call: Callable[[], T]) -> T:
        """A call of the sink, on a thread, repeated while the sink is away."""
        pause_s, told = self._config.away_s, False
        while True:
            try:
                result = await asyncio.to_thread(self._alone, call)
                if told:
                    log.info("sink is back", sink=self._sink.name)
                return result
            except SinkAway as error:
                if not told:
                    log.warning("sink is away; waiting", sink=self._sink.name, reason=error.text)
                told = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.away_most_s)

    def _alone(self, call: Callable[[], T]) -> T:
        """A call of the sink by itself: one that was cancelled still runs on its thread."""
        with self._lock:
            return call()

    async def close(self) -> None:
        await asyncio.to_thread(self._alone, self._sink.close)

    # --- how far it has read ------------------------------------------------------------------------------
    def _read_position(self) -> int:
        """The last event that the sink surely has; 0 if that is not known: then the sink says it per job."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return max(0, int(json.loads(self._sink.position_file.read_text())["sequence"]))
        return 0

    def _write_position(self, sequence: int) -> None:
        file = self._sink.position_file
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"sequence": sequence}))
        part.replace(file)


class Tracker:
    """Follows all jobs of a mesh for these sinks, as a service of `dmsc run`."""

    def __init__(self, bus: Bus, sinks: Sequence[Sink], config: TrackerConfig = TrackerConfig()) -> None:
        self._bus = bus
        self._sinks = sinks
        self._system = SystemFigures()
        self._feeds = [SinkFeed(bus, sink, self._system, config) for sink in sinks]

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Run until cancelled. Events of the time when it did not run are read first."""

        async def sample(message: InstanceSample, _: Envelope) -> None:
            self._system.take(message)

        subscription = await self._bus.subscribe(subjects.INSTANCE_SAMPLE, sample)
        reading = [asyncio.Event() for _ in self._feeds]
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed, begun in zip(self._feeds, reading, strict=True):
                    tasks.create_task(feed.run(begun))
                for begun in reading:
                    await begun.wait()
                log.info("tracker ready", sinks=[sink.name for sink in self._sinks])
                if ready is not None:
                    ready.set()
        finally:
            await subscription.stop()
            for feed in self._feeds:
                await feed.close()
