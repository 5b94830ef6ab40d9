"""A recorded run, handed to sinks as if it were live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bus import subjects
from bus.connection import Bus
from dmsc.replay.recordings import Archive, connected, open_recording
from dmsc.state.settings import BusAddress
from dmsc.tracking.figures import PointFold, SystemFigures, TrackedPoint, tracked_run
from dmsc.tracking.sink import Sink
from schemas.errors import DmscError
from schemas.job import JobEvent, JobRecord
from schemas.telemetry import InstanceSample

EACH = 500
"""Points in one write."""


async def track_recording(
    source: str, address: BusAddress | None, archive: Archive, sinks: Sequence[Sink]
) -> tuple[str, int]:
    """Store a recorded run's figures in the sinks; return the job and the number of its events.

    A recording has no stream sequences: its events are numbered from 1. Told twice, a run is there once.

    Raises:
        NotFound, BadInput, DamagedRun, Unavailable: As for `open_recording`; a sink that is away.
    """
    async with open_recording(source, address, archive) as recording:
        record = await _record(address, recording.job)
        system = SystemFigures()
        run = tracked_run(recording.job, record, recording.name)
        folds = [PointFold(await asyncio.to_thread(sink.begin, run)) for sink in sinks]
        waiting: list[list[TrackedPoint]] = [[] for _ in sinks]

        async def flush(least: int) -> None:
            for sink, fold, points in zip(sinks, folds, waiting, strict=True):
                if len(points) >= least:
                    await asyncio.to_thread(sink.write, recording.job, tuple(points), fold.position)
                    points.clear()

        count = 0
        async for frame in recording.frames:
            if frame.row is subjects.INSTANCE_SAMPLE:
                sample, _ = frame.open()
                assert isinstance(sample, InstanceSample)
                system.take(sample)
            elif frame.row is subjects.JOB_EVENT:
                event, _ = frame.open()
                assert isinstance(event, JobEvent)
                count += 1
                for fold, points in zip(folds, waiting, strict=True):
                    point = fold.take(count, event, system.of(recording.job))
                    if point is not None:
                        points.append(point)
                await flush(EACH)
        await flush(1)
        for sink in sinks:
            await asyncio.to_thread(sink.close)
        return recording.job, count


async def _record(address: BusAddress | None, job: str) -> JobRecord | None:
    """The job's record, if a mesh is there that has it."""
    if address is None:
        return None
    try:
        async with connected(address) as bus:
            return await _read(bus, job)
    except DmscError:
        return None


async def _read(bus: Bus, job: str) -> JobRecord | None:
    entry = await bus.bucket(subjects.JOB_RECORD).get(job=job)
    return entry.message if entry is not None and isinstance(entry.message, JobRecord) else None
