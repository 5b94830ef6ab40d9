"""The log files of a mesh stay bounded: beyond a size a file is copied and begun anew.

Whoever writes into one keeps it open, so it can't be renamed away. All open it for appending, so it may be
cut while they write: what they write between the copy's end and the cut is lost here, a line or two. Lines
from `info` on are on the bus as well (`dmsc logs`).
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

MOST_BYTES = 16 << 20
"""Of one file, the same as the server's own log has (`bus.server.embedded`)."""
KEPT = 2
"""Former parts of each: NAME.log.1 is the latest."""
LOOK_S = 10.0

log = get_logger("logs")


@asynccontextmanager
async def rotating(folder: Path, most_bytes: int = MOST_BYTES, look_s: float = LOOK_S) -> AsyncIterator[None]:
    """For the block, the `*.log` files of `folder` are looked at every `look_s` seconds."""

    async def look() -> None:
        failing = False
        while True:
            await asyncio.sleep(look_s)
            try:
                await asyncio.to_thread(rotate, folder, most_bytes)
                failing = False
            except OSError as error:  # no space for the copy: it may pass
                if not failing:
                    log.warning("log files can't be rotated", folder=str(folder), error=error.strerror)
                failing = True

    task = asyncio.create_task(look(), name="log rotation")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def rotate(folder: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Begins anew what is larger than `most_bytes`; which files these were. Raises `OSError` at the end where
    one could not be."""
    begun, failed = [], None
    for path in sorted(folder.glob("*.log")):
        try:
            if path.lstat().st_size > most_bytes and _begin_anew(path):
                begun.append(path)
        except FileNotFoundError:
            continue  # its job has ended
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return begun


def _begin_anew(path: Path) -> bool:
    """False: somebody else is at it."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
        try:
            fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fresh = Path(f"{path}.new")
        try:
            fresh.unlink(missing_ok=True)
            with fresh.open("xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)  # until nobody has added anything
            os.ftruncate(source.fileno(), 0)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        for number in range(KEPT, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}.{number - 1}", f"{path}.{number}")
        os.replace(fresh, f"{path}.1")
    return True
