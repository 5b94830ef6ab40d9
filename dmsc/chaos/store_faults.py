"""Faults of stored data: an unreadable value, and a full disk.

A value is written in the role of its bucket's own writer, with the mesh's root. Only a small disk is filled,
because filling a machine's main disk would affect all its users.
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
"""A disk with more free space than this is not filled."""
FULL_BYTES = 64 << 10
"""With less free space than this, the fault has fired."""
SMALL_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
BALLAST = "chaos-ballast"


async def spoil(address: BusAddress, pick: float) -> tuple[float, str]:
    """Overwrite an existing key with garbage. `pick` (0..1) selects the key and the garbage.

    Returns the time and the key.

    Raises:
        DmscError: Nothing was written.
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
            await jetstream.publish(bus.connection, f"{row.prefix}.{key}", garbage)
            return at, f"{row.bucket}.{key}"
    raise DmscError("no bucket has a key")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 256 MiB, in memory, on this folder for the block.

    Raises:
        BadInput: This machine does not permit the mount.
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
    """Raise `BadInput` if filling the disk of a folder would affect more than the mesh."""
    free = free_bytes(folder)
    if free > MOST_BYTES:
        raise BadInput(
            f"disk-full: {free >> 30} GiB are free at {folder}, and no disk of more than 1 GiB is filled; as "
            "root, `--private` mounts a small one, or start the mesh with --state on one of your own"
        )


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[float]:
    """Fill the disk of a folder for the block; yield the time from which it is full.

    Raises:
        DmscError: The disk did not get full.
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


async def fill(folder: Path, full_s: float) -> tuple[float, asyncio.Task[None]]:
    """Fill the disk for `full_s`. Returns the time and the task that frees it again, also if cancelled."""
    began: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        try:
            with filled(folder) as at:
                began.set_result(at)
                await asyncio.sleep(full_s)
        except DmscError as error:
            if not began.done():
                began.set_exception(error)

    task = asyncio.create_task(hold(), name="disk full")
    return await began, task
