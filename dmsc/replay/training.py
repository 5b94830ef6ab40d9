"""Recorded runs for trainers of modules: exported runs, tap files, jobs of a running mesh."""

from __future__ import annotations

from pathlib import Path

from bus.recording.run_record import Frame
from bus.subjects import (
    ADVERTISEMENT,
    COMPUTE,
    FAULT_VERDICT,
    INSTANCE_SAMPLE,
    JOB_EVENT,
    JOB_TOPOLOGY,
    LEARNT_STATE,
    OBSERVATION,
    QOS_REPORT,
    lookup,
)
from bus.tap.file import SUFFIX, read_tap
from dmsc.replay.recordings import Archive, open_recording
from dmsc.state.settings import BusAddress
from policies.kit.engine import Event
from policies.training import Run
from schemas.errors import BadMessage

ROWS = frozenset(
    {
        ADVERTISEMENT,
        COMPUTE,
        FAULT_VERDICT,
        INSTANCE_SAMPLE,
        JOB_EVENT,
        JOB_TOPOLOGY,
        LEARNT_STATE,
        OBSERVATION,
        QOS_REPORT,
    }
)
"""What trainers read of a run; nothing else is decoded."""


async def read_runs(sources: list[str], address: BusAddress | None, archive: Archive) -> list[Run]:
    """The runs in order. A file that ends in `.dmsctap` is a tap's; of others as `open_recording` says.

    Raises:
        NotFound, BadInput, DamagedRun, Unavailable: As for `open_recording`.
    """
    return [await _run(source, address, archive) for source in sources]


async def _run(source: str, address: BusAddress | None, archive: Archive) -> Run:
    events: list[Event] = []
    if source.endswith(SUFFIX):
        for raw in read_tap(Path(source)):
            found = lookup(raw.subject)
            if found is not None and not raw.operation:
                events += _events(Frame(found[0], int(raw.at * 1e9), raw.subject, raw.data))
    else:
        async with open_recording(source, address, archive) as recording:
            async for frame in recording.frames:
                events += _events(frame)
    return Run(name=source, events=events)


def _events(frame: Frame) -> list[Event]:
    """The frame as an event; none of other rows, or if it can't be read."""
    if frame.row not in ROWS:
        return []
    try:
        message, envelope = frame.open()
    except BadMessage:
        return []
    return [Event(row=frame.row, message=message, id=envelope.id, at=frame.at)]
