"""Frames in a compressed file: what runs (`run_file`) and recordings of a tap (`tap_file`) have in common.

Gzip members with msgpack objects behind each other: a header, one map with `format` and `version`; then the
frames, one array each, `[row, at_ns, subject, envelope]` and whatever a later version adds; then, where the
header could not know it, a map with their count and SHA-256.
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
    """Without name and time in it, so that the same content gives the same bytes."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", LEVEL, raw, mtime=0) as out:
        yield out


class _Readable:
    """Gives what is whole before it raises: a large read would lose it together with what is damaged."""

    def __init__(self, unzipped: gzip.GzipFile) -> None:
        self.read = unzipped.read1


class FrameFile:
    """An open file, one object after the other."""

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
        """Raises `BadInput`: there is no such file."""
        try:
            raw = path.open("rb")
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror or error}") from error
        with raw, gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
            yield cls(path, unzipped)

    def next(self) -> Any:
        """The next object; None at the end.

        Raises:
            DamagedRun: what follows is not whole; all that came before was.
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
    """Raises `BadInput`: the file is of a later format."""
    version = header.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise BadInput(f"{path}: format {version}; this version reads up to {VERSION}: update DMSC")
