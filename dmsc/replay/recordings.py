"""Opens the record of a run: an exported file, the archive in a state folder, or a running mesh."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bus import subjects
from bus.connection import Bus
from bus.recording import run_file, run_record
from bus.recording.run_file import SUFFIX, RunFile, RunHeader
from bus.recording.run_record import Frame
from dmsc.state.settings import BusAddress
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError, NotFound, Unavailable
from schemas.job import JobRecord
from schemas.telemetry import InstanceSample


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The record of a run, which can be read once. `where` names its source for people."""

    job: str
    name: str
    where: str
    ended: bool
    steps: int
    frames: AsyncIterator[Frame]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A line of `dmsc runs recorded`. Times are seconds since the epoch; `messages` counts the job's own."""

    job: str
    name: str
    state: str
    steps: int
    began: float
    until: float
    messages: int
    where: str


class Archive:
    """Imported runs, one file per job, in the folder `runs` of a state folder."""

    def __init__(self, state: Path) -> None:
        self.path = state / "runs"

    def __contains__(self, job: str) -> bool:
        return self.file(job).is_file()

    def file(self, job: str) -> Path:
        return self.path / f"{job}{SUFFIX}"

    def add(self, source: Path) -> RunHeader:
        """Check a file and archive a copy, replacing an older one. Raises `BadInput` or `DamagedRun`."""
        header = run_file.check_run(source)
        if not is_token(header.job):
            raise BadInput(f"{source}: its job is called {header.job!r}, which can't be")
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / f".{header.job}.part"
        try:
            shutil.copyfile(source, part)
            part.replace(self.file(header.job))
        finally:
            part.unlink(missing_ok=True)
        return header

    def list(self) -> list[Listed]:
        """List the archived runs. A damaged file is listed with its error."""
        runs = []
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            try:
                with RunFile.open(path) as run:
                    header = run.header
            except DmscError as error:
                runs.append(
                    Listed(
                        job=path.name.removesuffix(SUFFIX),
                        name="",
                        state=error.text,
                        steps=0,
                        began=0.0,
                        until=0.0,
                        messages=0,
                        where="archive",
                    )
                )
                continue
            state = "ended" if header.ended else "cut off while it ran"
            runs.append(
                Listed(
                    job=header.job,
                    name=header.name,
                    state=state,
                    steps=header.steps,
                    began=header.began,
                    until=header.until,
                    messages=header.count,
                    where="archive",
                )
            )
        return runs


@asynccontextmanager
async def open_recording(
    source: str, address: BusAddress | None, archive: Archive
) -> AsyncIterator[Recording]:
    """Open a file by its path, else a job's record in the mesh at `address`, else in the archive.

    Raises:
        NotFound: There is no such record.
        BadInput: The file is no run file, or `source` can't be a job's id.
        DamagedRun: The file is damaged.
        Unavailable: The archive does not have the run, and the mesh does not answer.
    """
    file = _named(source)
    if file is not None:
        with RunFile.open(file) as run:
            yield _of_file(run, source)
        return
    if not is_token(source):
        raise BadInput(f"{source}: neither a file nor a job's id")
    mesh_error: DmscError | None = None
    if address is not None:
        try:
            async with connected(address) as bus:
                recording = await live(bus, source)
                yield recording
                return
        except (NotFound, Unavailable) as error:
            mesh_error = error
    if source not in archive:
        raise mesh_error or NotFound(
            f"{source}: no such file, no mesh runs here, and {archive.path} has no run of that name"
        )
    with RunFile.open(archive.file(source)) as run:
        yield _of_file(run, f"{archive.file(source)}")


async def live(bus: Bus, job: str) -> Recording:
    """The record of a job in this mesh's streams. Raises `NotFound`."""
    span = await run_record.span_of(bus, job)
    record = await bus.bucket(subjects.JOB_RECORD).get(job=job)
    name, steps = "", 0
    if record is not None and isinstance(record.message, JobRecord):
        name, steps = record.message.spec.name, record.message.step
    frames = run_record.read_run(bus, job, span)
    return Recording(job=job, name=name, where="this mesh", ended=span.ended, steps=steps, frames=frames)


async def list_live(bus: Bus) -> list[Listed]:
    """The jobs that have messages in this mesh's streams, oldest first."""
    runs = []
    for job, rows in (await run_record.counts(bus)).items():
        try:
            span = await run_record.span_of(bus, job)
        except NotFound:
            continue  # without the job's events, its other messages can't be placed in time
        entry = await bus.bucket(subjects.JOB_RECORD).get(job=job)
        record = entry.message if entry is not None else None
        runs.append(
            Listed(
                job=job,
                name=record.spec.name if isinstance(record, JobRecord) else "",
                state=record.state.value if isinstance(record, JobRecord) else "",
                steps=record.step if isinstance(record, JobRecord) else 0,
                began=span.began,
                until=span.last,
                messages=sum(rows.values()),
                where="this mesh",
            )
        )
    return sorted(runs, key=lambda run: run.began)


@asynccontextmanager
async def connected(address: BusAddress) -> AsyncIterator[Bus]:
    """Open a client's connection to the bus."""
    async with Bus.connect(address.servers, name="runs", kind=EntityKind.CLIENT, token=address.token) as bus:
        yield bus


def _named(source: str) -> Path | None:
    """The file that `source` names; None if it names no file."""
    path = Path(source)
    return path if source.endswith(SUFFIX) or path.is_file() else None


def _of_file(run: RunFile, where: str) -> Recording:
    async def frames() -> AsyncIterator[Frame]:
        for frame in run.frames():
            yield frame

    header = run.header
    return Recording(
        job=header.job, name=header.name, where=where, ended=header.ended, steps=header.steps, frames=frames()
    )


async def recorded_samples(
    run: str, address: BusAddress | None, archive: Archive
) -> tuple[str, list[tuple[InstanceSample, float]]]:
    """The job's id, and its samples in order, each with the time when the server got it (epoch seconds).

    Raises:
        NotFound, BadInput, DamagedRun, Unavailable: As for `open_recording`.
    """
    samples: list[tuple[InstanceSample, float]] = []
    async with open_recording(run, address, archive) as recording:
        async for frame in recording.frames:
            if frame.row is subjects.INSTANCE_SAMPLE:
                sample, _ = frame.open()
                assert isinstance(sample, InstanceSample)
                samples.append((sample, frame.at))
        return recording.job, samples
