"""Lines of a file or pipe, in the batches in which they are pushed.

Of a pipe: what has come, as soon as it has. Of a file: always the same, so that a repetition is recognised.
"""

from __future__ import annotations

import os
import queue
import stat
import threading
from types import TracebackType
from typing import BinaryIO

from schemas.feeds import PUSH_BYTES

MOST_LINES = 10_000
"""Lines that wait to be pushed; beyond that the reader waits, and with it whoever writes into the pipe."""


class RecordLines:
    """Reads lines on a thread of its own, as a context.

    Args:
        source: What is read.
        most_bytes: Of a batch; one longer line is a batch of its own.
    """

    def __init__(self, source: BinaryIO, most_bytes: int = PUSH_BYTES) -> None:
        self._source = source
        self._is_file = _is_file(source)
        self._most_bytes = most_bytes
        self._lines: queue.Queue[bytes] = queue.Queue(MOST_LINES)
        self._left = b""
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="record-lines", daemon=True)

    def __enter__(self) -> RecordLines:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The thread ends with the process, if it waits for a pipe."""

    def take(self) -> bytes:
        """The next batch; empty: there is no more.

        Of a pipe, it waits for one line, and takes what is there besides; of a file, as much as fits.
        """
        batch: list[bytes] = []
        size = 0
        while not self._ended or self._left:
            line, self._left = self._left, b""
            if not line:
                try:
                    line = self._lines.get(block=self._is_file or not batch)
                except queue.Empty:
                    break
                if not line:
                    self._ended = True
                    break
            if batch and size + len(line) > self._most_bytes:
                self._left = line
                break
            if line.strip():
                batch.append(line)
                size += len(line)
        return b"".join(batch)

    def _read(self) -> None:
        for line in self._source:
            self._lines.put(line if line.endswith(b"\n") else line + b"\n")
        self._lines.put(b"")


def _is_file(source: BinaryIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    except OSError:
        return False
