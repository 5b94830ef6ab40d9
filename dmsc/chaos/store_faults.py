"""Faults of what the mesh keeps: a value that nobody can read, and a disk without room.

A value is written as its bucket's own writer would, under the mesh's root. A disk is filled only where it is
small: filling a machine's own would hit everybody on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bus.connection import Bus
from bus.nats import jetstream
from bus.subjects import SUBJECTS
from dmsc.state.settings import BusAddress
from schemas.errors import BadInput, DmscError

MOST_BYTES = 1 << 30
"""A disk with more free room than this is not filled."""
FULL_BYTES = 64 << 10
"""With less free room the fault has fired."""
FULL_S = 5.0
"""How long the disk stays full."""
SMALL_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
BALLAST = "chaos-ballast"


async def spoil(address: BusAddress, pick: float) -> tuple[float, str]:
    """Writes garbage over a key that is there; `pick` (0..1) chooses which, and what. Returns when and which.

    Raises:
        DmscError: it was not written.
    """
    draw = random.Random(pick)
    rows = [row for row in SUBJECTS if row.bucket is not None]
    draw.shuffle(rows)
    for row in rows:
        kind = min(row.senders)
        async with Bus.connect(address.servers, name="chaos", kind=kind, token=address.token) as bus:
            keys = sorted(await bus.bucket(row).keys())
            if not keys:
                continue
            key = draw.choice(keys)
            garbage = draw.choice((b"", b"\xc1" + draw.randbytes(32), b"\x87" + draw.randbytes(200)))
            at = time.time()
            await jetstream.publish(bus.link, f"{row.prefix}.{key}", garbage)
            return at, f"{row.bucket}.{key}"
    raise DmscError("no bucket has a key")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of 256 MiB on this folder, in memory.

    Raises:
        BadInput: this machine does not let us.
    """
    mount = ("mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES},mode=700", "tmpfs", str(folder))
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        refused = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        refused = str(error)
    if refused:
        raise BadInput(
            f"disk-full: a small disk can't be mounted ({refused}); be root, or start the mesh with "
            "--state on one"
        )
    try:
        yield
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=False)


def check_disk(folder: Path) -> None:
    """Raises `BadInput` where filling the disk of a folder would hit more than the mesh."""
    free = free_bytes(folder)
    if free > MOST_BYTES:
        raise BadInput(
            f"disk-full: {free >> 30} GiB are free at {folder}, and no disk of more than 1 GiB is filled; as "
            "root, `--private` mounts a small one, or start the mesh with --state on one of your own"
        )


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[float]:
    """The disk of a folder is full inside the block, from the time that is yielded.

    Raises:
        DmscError: it did not get full.
    """
    check_disk(folder)
    ballast = folder / BALLAST
    try:
        _fill(ballast)
        if free_bytes(folder) > FULL_BYTES:
            raise DmscError(f"the disk of {folder} did not get full")
        yield time.time()
    finally:
        ballast.unlink(missing_ok=True)


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for piece in (PIECE_BYTES, 4096, 512):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * piece) == piece:
                    continue


async def fill(folder: Path) -> tuple[float, asyncio.Task[None]]:
    """Fills the disk for a while; when, and what frees it again, also if it is cancelled."""
    began: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        try:
            with filled(folder) as at:
                began.set_result(at)
                await asyncio.sleep(FULL_S)
        except DmscError as error:
            if not began.done():
                began.set_exception(error)

    task = asyncio.create_task(hold(), name="disk full")
    return await began, task
