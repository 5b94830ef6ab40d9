"""What a tap has seen, in a file: written as it comes, read again like a tap; secrets are not in it.

The format is that of runs (`bus.recording.frame_file`), and runs' files are read here as well. The header
knows neither count nor SHA-256 yet, so they follow the frames; a file without them was cut off, and whatever
it holds is whole: the compressed stream is closed off to the last frame once a second.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgpack

from bus import subjects
from bus.nats.jetstream import NANO
from bus.recording.frame_file import LEVEL, VERSION, FrameFile, check_version
from bus.recording.run_file import FORMAT as RUN_FORMAT
from bus.tap.message import RawMessage, TappedMessage
from schemas.errors import BadInput, DamagedRun

FORMAT = "dmsc-tap"
SUFFIX = ".dmsctap"
CLOSED_OFF_S = 1.0
"""How much of a recording is lost if the tap itself is killed."""
UNKNOWN_ROW = -1


@dataclass(slots=True)
class TapRecorder:
    """`with TapRecorder(path) as recorder: recorder.add(tapped)`. Only its owner can read the file.

    Raises:
        BadInput: the file exists already, or can't be written.
    """

    path: Path
    count: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)
    _rows: dict[str, int] = field(default_factory=dict)
    _out: gzip.GzipFile = field(init=False)
    _raw: BinaryIO = field(init=False)

    def __enter__(self) -> Self:
        try:
            self._raw = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except FileExistsError:
            raise BadInput(f"{self.path}: exists already; name another file, or remove it") from None
        except OSError as error:
            raise self._unwritable(error) from error
        self._out = gzip.GzipFile("", "wb", LEVEL, self._raw, mtime=0)
        self._rows = {row.name: number for number, row in enumerate(subjects.SUBJECTS)}
        header = {"format": FORMAT, "version": VERSION, "began": time.time(), "rows": list(self._rows)}
        self._write(msgpack.packb(header))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._out.write(msgpack.packb({"count": self.count, "sha256": self._digest.hexdigest()}))
            self._out.close()
        except OSError as failure:
            if error is None:
                raise self._unwritable(failure) from failure
        finally:
            self._raw.close()

    def add(self, tapped: TappedMessage) -> None:
        """Keep one message, redacted as it is shown. Raises `BadInput` where the disk is full."""
        row = UNKNOWN_ROW if tapped.row is None or tapped.answers else self._rows[tapped.row.name]
        frame = [row, int(tapped.at * NANO), tapped.subject, tapped.raw, tapped.operation, tapped.size]
        packed = msgpack.packb(frame)
        self._digest.update(packed)
        self.count += 1
        self._write(packed)

    def close_off(self) -> None:
        """Whatever was added is on the disk. To be called once a second (`CLOSED_OFF_S`)."""
        try:
            self._out.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self, packed: bytes) -> None:
        try:
            self._out.write(packed)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> BadInput:
        return BadInput(f"{self.path}: can't be written: {error.strerror or error}")


def read_tap(path: Path) -> Generator[RawMessage, None, None]:
    """What was recorded, in its order, from a tap's file or a run's.

    Raises:
        BadInput: there is no such file, or it is of a later format.
        DamagedRun: behind the last message that is whole.
    """
    with FrameFile.open(path) as file:
        header = file.next()
        if not isinstance(header, dict) or header.get("format") not in (FORMAT, RUN_FORMAT):
            raise DamagedRun(f"{path}: no recording (`dmsc tap --record` and `dmsc runs export` write them)")
        check_version(path, header)
        digest, count, told = hashlib.sha256(), 0, header
        while True:
            raw = _next(file, count)
            if raw is None:
                break
            if isinstance(raw, dict):
                told = raw
                break
            try:
                _, at_ns, subject, data, *rest = raw
                arrived = RawMessage(at_ns / NANO, str(subject), bytes(data), str(rest[0]) if rest else "")
            except (TypeError, ValueError) as error:
                raise DamagedRun(f"{path}: damaged: message {count + 1} is not one") from error
            digest.update(msgpack.packb(raw))
            count += 1
            yield arrived
        if told.get("count") is None or told["count"] != count:
            of = f" of {told['count']:,}" if isinstance(told.get("count"), int) else ""
            raise DamagedRun(f"{path}: cut off: the first {count:,}{of} messages are whole")
        if told.get("sha256") != digest.hexdigest():
            raise DamagedRun(f"{path}: damaged: its SHA-256 is not the one it was written with")


def _next(file: FrameFile, count: int) -> Any:
    """Raises `DamagedRun`, with how much of it was whole."""
    try:
        return file.next()
    except DamagedRun as error:
        raise DamagedRun(
            f"{file.path}: cut off or damaged: the first {count:,} messages are whole"
        ) from error
