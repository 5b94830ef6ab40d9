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

import psutil

from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.wire import request_progress as progress
from bus.wire.correlation import stand_alone
from bus.wire.request_progress import RequestProgress
from schemas.errors import DmscError
from schemas.registry import InstanceState

log = get_logger("instance")

TELL_S = 10.0
IDLE_SHARE = 0.02
"""Of a processor, which a process takes whose work stands still: for its heartbeats."""
READ_BYTES = 1 << 20


class _Advance(NamedTuple):
    computed_s: float
    read_bytes: int | None
    """From files and from disks; None where the system does not say."""
    moved: int

    def is_beyond(self, before: _Advance, lapse_s: float) -> bool:
        return (
            self.computed_s - before.computed_s > IDLE_SHARE * lapse_s
            or (self.read_bytes or 0) - (before.read_bytes or 0) > READ_BYTES
            or self.moved > before.moved
        )

    def __str__(self) -> str:
        read = "" if self.read_bytes is None else f", {self.read_bytes >> 20} MiB read"
        return f"getting ready: {self.computed_s:.0f} s computed{read}"


@contextlib.asynccontextmanager
async def progress_told(presence: RegistrationClient) -> AsyncIterator[None]:
    """While it is open, the registry hears how far this process is, every `TELL_S` in which it got on."""
    fetched = RequestProgress()
    token = progress.present.set(fetched)
    telling = asyncio.create_task(_tell(presence, fetched), name="progress of getting ready")
    try:
        yield
    finally:
        progress.present.reset(token)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(presence: RegistrationClient, fetched: RequestProgress) -> None:
    stand_alone()
    before = _advance(fetched)
    while True:
        await asyncio.sleep(TELL_S)
        now = _advance(fetched)
        if not now.is_beyond(before, TELL_S):
            continue
        before = now
        try:
            await presence.change(InstanceState.PENDING, str(now))
        except DmscError as error:  # the next word says as much
            log.info("progress not told", sid=presence.record.sid, reason=error.text)


def _advance(fetched: RequestProgress) -> _Advance:
    return _Advance(time.process_time(), _read_bytes(), fetched.so_far)


def _read_bytes() -> int | None:
    try:
        return int(psutil.Process().io_counters().read_chars)
    except (psutil.Error, AttributeError):  # not where there is no such count, nor for a user of its own
        return None
