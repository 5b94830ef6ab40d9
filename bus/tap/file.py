"""Tap files: messages that a tap has seen, written as they come and read like a tap; they hold no secrets.

The format is that of runs (`bus.recording.frame_file`), and this module reads runs' files, too. Count and
SHA-256 are not known when the header is written, so they follow the frames. A file without them was cut off;
the frames in it are whole, because the compressed stream is flushed to the last frame once a second.
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
UNKNOWN_ROW = -1


@dataclass(slots=True)
class TapRecorder:
    """`with TapRecorder(path) as recorder: recorder.add(tapped)`. Only the file's owner can read it.

    Raises:
        BadInput: the file exists already, or can't be written.
    """

    path: Path
    count: int = 0
    flush_s: float = 1.0
    """Seconds between two flushes: the most that is lost of a recording if the tap is killed."""
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
        """Writes one message, redacted as it is shown.

        Raises:
            BadInput: the file can't be written, for example because the disk is full.
        """
        row = UNKNOWN_ROW if tapped.row is None or tapped.answers else self._rows[tapped.row.name]
        frame = [row, int(tapped.at * NANO), tapped.subject, tapped.raw, tapped.operation, tapped.size]
        packed = msgpack.packb(frame)
        self._digest.update(packed)
        self.count += 1
        self._write(packed)

    def close_off(self) -> None:
        """Flushes all added messages to the file. Call it every `flush_s`."""
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
    """Yields the recorded messages in order, from a tap's file or a run's.

    Raises:
        BadInput: there is no such file, or it has a later format.
        DamagedRun: after the last whole message, if the file is damaged or cut off.
    """
    with FrameFile.open(path) as file:
        header = file.next()
        if not isinstance(header, dict) or header.get("format") not in (FORMAT, RUN_FORMAT):
            raise DamagedRun(f"{path}: no recording (`dmsc tap --record` and `dmsc runs export` write them)")
        check_version(path, header)
        digest, count, totals = hashlib.sha256(), 0, header
        while True:
            raw = _next(file, count)
            if raw is None:
                break
            if isinstance(raw, dict):
                totals = raw
                break
            try:
                _, at_ns, subject, data, *rest = raw
                message = RawMessage(at_ns / NANO, str(subject), bytes(data), str(rest[0]) if rest else "")
            except (TypeError, ValueError) as error:
                raise DamagedRun(f"{path}: damaged: message {count + 1} is not one") from error
            digest.update(msgpack.packb(raw))
            count += 1
            yield message
        if totals.get("count") is None or totals["count"] != count:
            of = f" of {totals['count']:,}" if isinstance(totals.get("count"), int) else ""
            raise DamagedRun(f"{path}: cut off: the first {count:,}{of} messages are whole")
        if totals.get("sha256") != digest.hexdigest():
            raise DamagedRun(f"{path}: damaged: its SHA-256 is not the one it was written with")


def _next(file: FrameFile, count: int) -> Any:
    """The next frame.

    Raises:
        DamagedRun: the file is damaged or cut off; the text says how many messages are whole.
    """
    try:
        return file.next()
    except DamagedRun as error:
        raise DamagedRun(
            f"{file.path}: cut off or damaged: the first {count:,} messages are whole"
        ) from error
