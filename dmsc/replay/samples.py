"""What instances measured of themselves in a recorded run."""

from __future__ import annotations

from bus import subjects
from dmsc.replay.recordings import Archive, open_recording
from dmsc.state.settings import BusAddress
from schemas.telemetry import InstanceSample


async def recorded_samples(
    run: str, address: BusAddress | None, archive: Archive
) -> tuple[str, list[tuple[InstanceSample, float]]]:
    """The job's id, and its samples with when the server got them, seconds since the epoch, in order.

    Raises:
        NotFound, BadInput, DamagedRun, Unavailable: as `open_recording`.
    """
    samples: list[tuple[InstanceSample, float]] = []
    async with open_recording(run, address, archive) as recording:
        async for frame in recording.frames:
            if frame.row is subjects.INSTANCE_SAMPLE:
                sample, _ = frame.open()
                assert isinstance(sample, InstanceSample)
                samples.append((sample, frame.at))
        return recording.job, samples
