"""Watches an embedded server's store: notices full disks and deleted folders.

Once a write to a stream has failed, nats-server answers no further writes to that stream until it is
restarted, even when there is space again; nothing acknowledged is lost by that. It notices the deletion of
its store only when it creates a file. `StoreWatch` says what is wrong, and when a restart helps.
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

ROOM_BYTES = 8 << 20
"""With less free space the disk counts as full: a server needs some space to start and to go on."""


class StoreWatch:
    """Watches the store during one run of a server, every `look_s`. `full` is true while its disk is full.

    `again_s` is the shortest pause between restarts for a store that takes no writes although there is space.
    """

    def __init__(
        self,
        server: EmbeddedServer,
        say: Callable[[str], None],
        *,
        look_s: float = 1.0,
        again_s: float = 5.0,
    ) -> None:
        self._look_s = look_s
        self._again_s = again_s
        self._server = server
        self._say = say
        self._began = time.monotonic()
        self._folder = server.store_dir / "jetstream"
        self._known = folders(self._folder)
        self._missed = 0
        self.full = False

    async def trouble(self) -> str:
        """Waits until a restart of the server is needed and helps; returns the reason."""
        while True:
            await asyncio.sleep(self._look_s)
            if missing := self._missing_folder():
                self._missed += 1
                if self._missed > 1:  # a stream that is deleted properly is unknown at the next check
                    return f"{missing} was deleted under it"
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
            if broken and time.monotonic() - self._began > self._again_s:
                return f"there is room on its disk, and it takes no writes ({error or 'the disk was full'})"

    def _missing_folder(self) -> Path | None:
        """A folder of an earlier check that is now missing or has been replaced; None if there is none."""
        now = folders(self._folder)
        missing = [path for path, inode in self._known.items() if now.get(path) != inode]
        if not missing or self._missed:
            self._known = now
        return min(missing, default=None)


def folders(store: Path) -> dict[Path, int]:
    """The inodes of a store's folders, down to its streams."""
    inodes: dict[Path, int] = {}
    for path in (store, *store.glob("*"), *store.glob("*/streams"), *store.glob("*/streams/*/msgs")):
        try:
            inodes[path] = path.stat().st_ino
        except OSError:  # removed since it was listed
            continue
    return inodes


def free_bytes(folder: Path) -> int:
    """The free bytes on a folder's disk; 0 if they can't be read."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def write_error(monitor_url: str | None, *, timeout_s: float = 2.0) -> str:
    """The server's report of a stream that it can't write; empty if there is none or it does not answer."""
    if monitor_url is None:
        return ""
    place = urlsplit(monitor_url)
    context = ssl._create_unverified_context() if place.scheme == "https" else None  # our own child's page
    connection = (
        http.client.HTTPConnection(place.netloc, timeout=timeout_s)
        if context is None
        else http.client.HTTPSConnection(place.netloc, timeout=timeout_s, context=context)
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
