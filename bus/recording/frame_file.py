"""Frames in a compressed file: the format that runs (`run_file`) and tap files (`bus.tap.file`) share.

A file consists of gzip members with msgpack objects one after the other: a header, which is a map with
`format` and `version`; then the frames, which are arrays `[row, at_ns, subject, envelope]` with whatever a
later version adds; then, if the header could not contain them, a map with their count and SHA-256.
"""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from bus.wire.codec import MAX_MESSAGE_BYTES
from schemas.errors import BadInput, DamagedRun

VERSION = 1
LEVEL = 6
CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (64 << 10)


@contextlib.contextmanager
def compressed(path: Path) -> Iterator[gzip.GzipFile]:
    """Opens a gzip file for writing, without name and time in it: equal content gives equal bytes."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", LEVEL, raw, mtime=0) as out:
        yield out


class _Readable:
    """A reader that returns the whole data before a damage; a large read would lose that, too."""

    def __init__(self, unzipped: gzip.GzipFile) -> None:
        self.read = unzipped.read1


class FrameFile:
    """An open file, read one object after the other."""

    def __init__(self, path: Path, unzipped: gzip.GzipFile) -> None:
        self.path = path
        self._unpacker = msgpack.Unpacker(
            _Readable(unzipped),
            read_size=CHUNK_BYTES,
            max_buffer_size=MAX_FRAME_BYTES + CHUNK_BYTES,
        )

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[FrameFile]:
        """Opens a file for reading until the end of the block.

        Raises:
            BadInput: there is no such file.
        """
        try:
            raw = path.open("rb")
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror or error}") from error
        with raw, gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
            yield cls(path, unzipped)

    def next(self) -> Any:
        """The next object; None at the end.

        Raises:
            DamagedRun: the next object is not whole; all earlier ones were.
        """
        path = self.path
        try:
            return next(self._unpacker, None)
        except EOFError as error:
            raise DamagedRun(f"{path}: cut off: export or copy it again") from error
        except (OSError, zlib.error) as error:
            raise DamagedRun(f"{path}: damaged, or no run's file or recording ({error})") from error
        except (ValueError, msgpack.UnpackException) as error:
            raise DamagedRun(f"{path}: damaged: not msgpack ({type(error).__name__})") from error


def check_version(path: Path, header: dict[str, Any]) -> None:
    """Checks the header's version.

    Raises:
        BadInput: the file has a later format.
    """
    version = header.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise BadInput(f"{path}: format {version}; this version reads up to {VERSION}: update DMSC")
