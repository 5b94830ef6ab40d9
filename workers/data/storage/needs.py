"""What the readers of a node's cache need, as each publishes it in a small file for the others.

A reader holds a lock on its file as long as it lives. So what a reader that was killed had published counts
no more, without anybody having to find that out.

The file: `first line` JSON {written_at}, then per block its key (16 bytes) and the seconds until it is needed
(float32, little-endian).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path

from workers.data.storage.block_file import KEY_BYTES

_ENTRY = struct.Struct(f"<{KEY_BYTES}sf")
MOST_BYTES = 8 << 20
"""Files that are larger are not read: they are not of ours."""


class PublishedNeeds:
    """One reader's file, and those of the others. All calls block on the disk, briefly.

    Args:
        folder: Of all readers of one user on this node.
        name: Distinguishes this reader.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._path = folder / f"{name}-{secrets.token_hex(4)}"
        self._file = -1

    def publish(self, needs: Mapping[str, float], now: float) -> None:
        """Replaces what this reader needs: key of each block → seconds from now until it does.

        Args:
            needs: Soonest first if it may be cut off: at most `MOST_BYTES` are written.
            now: Seconds since 1970.
        """
        entries = [_ENTRY.pack(bytes.fromhex(key), seconds) for key, seconds in needs.items()]
        entries = entries[: (MOST_BYTES - 4096) // _ENTRY.size]
        text = json.dumps({"written_at": now}).encode() + b"\n" + b"".join(entries)
        if self._file >= 0 and not self._path.exists():  # taken for a dead reader's before it was locked
            os.close(self._file)
            self._file = -1
        if self._file < 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with contextlib.suppress(BlockingIOError):  # a reader that was frozen while it looked
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # In place, under the reader's own lock: a file that was renamed over it would have no lock yet.
        # Whoever reads half of it sees a wrong need, at worst.
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    def of_others(self, now: float) -> dict[str, float]:
        """Seconds from now until any other reader needs a block, by key; 0 if that moment has passed."""
        needs: dict[str, float] = {}
        for path in self._others():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, struct.error):
                if (content := _live_content(path)) is None:
                    continue
                head, _, body = content.partition(b"\n")
                passed_s = max(0.0, now - float(json.loads(head)["written_at"]))
                whole = len(body) - len(body) % _ENTRY.size
                for key, seconds in _ENTRY.iter_unpack(body[:whole]):
                    left_s = max(0.0, seconds - passed_s)
                    name = key.hex()
                    if left_s < needs.get(name, float("inf")):
                        needs[name] = left_s
        return needs

    def has_others(self) -> bool:
        """Whether there are files of others, alive or not."""
        return bool(self._others())

    def _others(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path != self._path)
        except OSError:
            return []

    def close(self) -> None:
        """Withdraws what was published. Idempotent."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = -1


def _live_content(path: Path) -> bytes | None:
    """The content of a reader's file; None, and the file is removed, if its reader is gone."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(file, MOST_BYTES, 0)
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    finally:
        os.close(file)
