"""How far an instance is that is not ready yet: told to the registry for as long as it gets on.

A stage is built in milliseconds or in an hour: whoever ordered it waits for as long as it hears of progress,
and people read there what their instance does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from bus import progress
from bus.correlation import stand_alone
from bus.logs import get_logger
from bus.presence import Presence
from bus.progress import Progress
from schemas.errors import DmscError
from schemas.registry import InstanceState

log = get_logger("instance")

TELL_S = 10.0
IDLE_SHARE = 0.02
"""Of a processor, which a process takes whose work stands still: for its heartbeats."""
READ_BYTES = 1 << 20


class _Advance(NamedTuple):
    computed_s: float
    read_bytes: int
    moved: int

    def is_beyond(self, before: _Advance, lapse_s: float) -> bool:
        return (
            self.computed_s - before.computed_s > IDLE_SHARE * lapse_s
            or self.read_bytes - before.read_bytes > READ_BYTES
            or self.moved > before.moved
        )


@contextlib.asynccontextmanager
async def progress_told(presence: Presence) -> AsyncIterator[None]:
    """While it is open, the registry hears how far this process is, every `TELL_S` in which it got on."""
    fetched = Progress()
    token = progress.present.set(fetched)
    telling = asyncio.create_task(_tell(presence, fetched), name="progress of getting ready")
    try:
        yield
    finally:
        progress.present.reset(token)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(presence: Presence, fetched: Progress) -> None:
    stand_alone()
    before = _advance(fetched)
    while True:
        await asyncio.sleep(TELL_S)
        now = _advance(fetched)
        if not now.is_beyond(before, TELL_S):
            continue
        before = now
        said = f"getting ready: {now.computed_s:.0f} s computed, {now.read_bytes >> 20} MiB read"
        try:
            await presence.change(InstanceState.PENDING, said)
        except DmscError as error:  # the next word says as much
            log.info("progress not told", sid=presence.record.sid, reason=error.text)


def _advance(fetched: Progress) -> _Advance:
    return _Advance(time.process_time(), _read_bytes(), fetched.so_far)


def _read_bytes() -> int:
    """By this process, from files and from disks; 0 where the kernel does not say."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            figures = dict(line.split(": ") for line in file.read().splitlines())
        return int(figures["rchar"]) + int(figures["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0
