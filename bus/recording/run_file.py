"""A run in one file: the recorded messages as they were sent, verified when they are read.

A file has two gzip members (`bus.recording.frame_file`). The first holds the header, one msgpack map. The
second holds the frames, msgpack arrays `[row, at_ns, subject, envelope]`: `row` is an index into the header's
`rows`, and `envelope` the bytes that were on the bus. The header comes first but is complete last, because it
has count and SHA-256 of the frames; so the frames are written to another file and appended. Reading and
writing hold one frame in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import AsyncIterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgpack

from bus import subjects
from bus.nats.jetstream import NANO
from bus.recording.frame_file import CHUNK_BYTES, VERSION, FrameFile, check_version, compressed
from bus.recording.run_record import RECORDED, Frame
from schemas.errors import BadInput, DamagedRun, NotFound

FORMAT = "dmsc-run"
SUFFIX = ".dmscrun"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """The header of a run's file. Times are in seconds since the epoch; `sha256` covers all frames."""

    job: str
    name: str
    began: float
    until: float
    steps: int
    ended: bool
    rows: tuple[str, ...]
    count: int
    sha256: str
    version: int = VERSION


async def write_run(
    path: Path, frames: AsyncIterable[Frame], *, job: str, name: str, steps: int, ended: bool
) -> RunHeader:
    """Writes a run's file; an existing one is replaced once the new one is complete.

    Raises:
        BadInput: the file can't be written.
        NotFound: there are no frames.
    """
    rows = tuple(row.name for row in RECORDED)
    number = {name: index for index, name in enumerate(rows)}
    pack = msgpack.Packer().pack
    digest, count, began_ns, until_ns = hashlib.sha256(), 0, 0, 0
    part, frames_part = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.frames")
    try:
        with compressed(frames_part) as out:
            async for frame in frames:
                packed = pack([number[frame.row.name], frame.at_ns, frame.subject, frame.data])
                out.write(packed)
                digest.update(packed)
                began_ns, until_ns, count = began_ns or frame.at_ns, frame.at_ns, count + 1
        if not count:
            raise NotFound(f"nothing is recorded of a job {job}", job=job)
        header = RunHeader(
            job=job,
            name=name,
            began=began_ns / NANO,
            until=until_ns / NANO,
            steps=steps,
            ended=ended,
            rows=rows,
            count=count,
            sha256=digest.hexdigest(),
        )
        with compressed(part) as out:
            out.write(pack({"format": FORMAT, **asdict(header)}))
        with part.open("ab") as whole, frames_part.open("rb") as rest:
            shutil.copyfileobj(rest, whole, CHUNK_BYTES)
        os.replace(part, path)
        return header
    except OSError as error:
        raise BadInput(f"{path}: can't be written: {error.strerror or error}") from error
    finally:
        for path_to_remove in (part, frames_part):
            path_to_remove.unlink(missing_ok=True)


class RunFile:
    """A run's file, open for one pass. `with RunFile.open(path) as run: for frame in run.frames(): …`"""

    def __init__(self, file: FrameFile, header: RunHeader) -> None:
        self.path = file.path
        self.header = header
        self._file = file

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[RunFile]:
        """Opens a file for one pass until the end of the block.

        Raises:
            BadInput: there is no such file, or it has a later format.
            DamagedRun: it is not a run's file.
        """
        with FrameFile.open(path) as file:
            yield cls(file, _header(path, file.next()))

    def frames(self) -> Iterator[Frame]:
        """Yields all frames in order, except those of rows that this version does not know.

        Raises:
            DamagedRun: the file is damaged or cut off; raised at the latest after the last frame.
        """
        rows = {row.name: row for row in subjects.SUBJECTS}
        rows_by_number = [rows.get(name) for name in self.header.rows]
        pack = msgpack.Packer().pack
        digest, count = hashlib.sha256(), 0
        while (raw := self._file.next()) is not None:
            try:
                number, at_ns, subject, data = raw
                row = rows_by_number[number]
                digest.update(pack(raw))
            except (TypeError, ValueError, IndexError) as error:
                raise DamagedRun(f"{self.path}: damaged: frame {count + 1} is not one") from error
            count += 1
            if row is not None:
                yield Frame(row, at_ns, subject, data)
        if count != self.header.count:
            raise DamagedRun(
                f"{self.path}: cut off: {count:,} of {self.header.count:,} messages; export or copy it again"
            )
        if digest.hexdigest() != self.header.sha256:
            raise DamagedRun(f"{self.path}: damaged: its SHA-256 is not the one it was written with")


def check_run(path: Path) -> RunHeader:
    """Reads a file to its end; raises as `RunFile` does."""
    with RunFile.open(path) as run:
        for _ in run.frames():
            pass
        return run.header


def _header(path: Path, raw: object) -> RunHeader:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DamagedRun(f"{path}: no run's file (`dmsc runs export` writes them)")
    check_version(path, raw)
    try:
        fields = {name: raw[name] for name in RunHeader.__dataclass_fields__}
        return RunHeader(**fields | {"rows": tuple(fields["rows"])})
    except (KeyError, TypeError) as error:
        raise DamagedRun(f"{path}: damaged: its header lacks {error}") from error
