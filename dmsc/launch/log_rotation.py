"""Keeps the log files of a mesh bounded: a file that is too large is copied and then truncated.

A writer keeps its file open, so the file can't be renamed. All writers open it in append mode, so it may be
truncated while they write. What they write between the end of the copy and the truncation is lost here, a
line or two. Lines of level `info` and above are on the bus as well (`dmsc logs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bus.logs import get_logger
from bus.tasks import background

MOST_BYTES = 16 << 20
"""The maximal size of a file; the NATS server's own log has the same limit (`bus.server.embedded`)."""
KEPT = 2
"""How many former parts of each file are kept; NAME.log.1 is the latest."""

log = get_logger("logs")


@asynccontextmanager
async def rotating(folder: Path, most_bytes: int = MOST_BYTES, look_s: float = 10.0) -> AsyncIterator[None]:
    """Rotate the `*.log` files of `folder` every `look_s` seconds, for the block."""

    async def run() -> None:
        failing = False
        while True:
            await asyncio.sleep(look_s)
            try:
                await asyncio.to_thread(rotate, folder, most_bytes)
                failing = False
            except OSError as error:  # no space for the copy: the next attempt may succeed
                if not failing:
                    log.warning("log files can't be rotated", folder=str(folder), error=error.strerror)
                failing = True

    async with background(run(), name="log rotation"):
        yield


def rotate(folder: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Rotate each file that is larger than `most_bytes`, and return those files.

    Raises:
        OSError: A file could not be rotated; it is raised after the other files.
    """
    rotated, failed = [], None
    for path in sorted(folder.glob("*.log")):
        try:
            if path.lstat().st_size > most_bytes and _rotate_file(path):
                rotated.append(path)
        except FileNotFoundError:
            continue  # its job has ended, and the file was removed
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return rotated


def _rotate_file(path: Path) -> bool:
    """Copy a file and truncate it. Returns False if another process is rotating it."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
        try:
            fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fresh = Path(f"{path}.new")
        try:
            fresh.unlink(missing_ok=True)
            with fresh.open("xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)  # until a read finds no new lines
            os.ftruncate(source.fileno(), 0)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        for number in range(KEPT, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}.{number - 1}", f"{path}.{number}")
        os.replace(fresh, f"{path}.1")
    return True
