"""Whether an embedded server's store is there, and takes writes: full disks and deleted folders are noticed.

nats-server answers nobody who writes into a stream once a write of it has failed, also when there is room
again, until it is started anew; nothing acknowledged is lost by that. A store that is deleted under it is
noticed by it only when a file is made. `StoreWatch` says what is wrong, and when a new start mends it.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from bus.server.embedded import EmbeddedServer

LOOK_S = 1.0
ROOM_BYTES = 8 << 20
"""With less, the disk counts as full: a server needs some room to start and to go on."""
AGAIN_S = 5.0
"""Least pause between starts for a store that takes no writes although there is room."""
HEALTH_S = 2.0


class StoreWatch:
    """Of one start of a server. `full` says so while its disk is full."""

    def __init__(self, server: EmbeddedServer, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._began = time.monotonic()
        self._folder = server.store_dir / "jetstream"
        self._known = folders(self._folder)
        self._missed = 0
        self.full = False

    async def trouble(self) -> str:
        """Returns why the server has to be started again, once that helps."""
        while True:
            await asyncio.sleep(LOOK_S)
            if gone := self._gone():
                self._missed += 1
                if self._missed > 1:  # a stream that is deleted in order is unknown at the next look
                    return f"{gone} was deleted under it"
            else:
                self._missed = 0
            free = free_bytes(self._server.store_dir)
            error = await asyncio.to_thread(write_error, self._server.monitor_url)
            if free < ROOM_BYTES and not self.full:
                self._say(
                    f"the disk of the bus is full: {free >> 20} MiB free at {self._server.store_dir}. "
                    "Jobs wait, and nothing is lost; make room there, and they go on by themselves"
                )
                self.full = True
            if free < ROOM_BYTES:
                continue
            broken = error or (self.full and self._server.monitor_url is None)
            self.full = False
            if broken and time.monotonic() - self._began > AGAIN_S:
                return f"there is room on its disk, and it takes no writes ({error or 'the disk was full'})"

    def _gone(self) -> Path | None:
        """What was there at an earlier look and is not any more, or not the same."""
        now = folders(self._folder)
        lost = [path for path, inode in self._known.items() if now.get(path) != inode]
        if not lost or self._missed:
            self._known = now
        return min(lost, default=None)


def folders(store: Path) -> dict[Path, int]:
    """The folders of a store down to its streams, with their inodes."""
    found: dict[Path, int] = {}
    for path in (store, *store.glob("*"), *store.glob("*/streams"), *store.glob("*/streams/*/msgs")):
        try:
            found[path] = path.stat().st_ino
        except OSError:  # gone between the two looks
            continue
    return found


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder is on; none where it can't be asked."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def write_error(monitor_url: str | None) -> str:
    """What a server says of a stream that it can't write; empty: nothing, or it does not answer."""
    if monitor_url is None:
        return ""
    place = urlsplit(monitor_url)
    context = ssl._create_unverified_context() if place.scheme == "https" else None  # our own child's page
    connection = (
        http.client.HTTPConnection(place.netloc, timeout=HEALTH_S)
        if context is None
        else http.client.HTTPSConnection(place.netloc, timeout=HEALTH_S, context=context)
    )
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        text = answer.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    return text if answer.status >= 500 and ("write error" in text or "no space left" in text) else ""
