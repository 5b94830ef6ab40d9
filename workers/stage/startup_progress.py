"""Progress reports of an instance that is not ready yet: published to the registry while it advances.

Building a stage takes milliseconds or an hour. The orchestrator waits as long as it sees progress, and users
read in the registry what their instance does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.tasks import background
from bus.wire import request_progress
from bus.wire.correlation import stand_alone
from bus.wire.request_progress import RequestProgress
from schemas.errors import DmscError
from schemas.registry import InstanceState

log = get_logger("instance")


@dataclass(frozen=True, kw_only=True)
class StartupConfig:
    """When progress is reported, and how little is none."""

    report_s: float = 10.0
    """Seconds between two reports."""
    idle_share: float = 0.02
    """Share of a processor that an idle process takes for its heartbeats: no more is no progress."""
    read_bytes: int = 1 << 20
    """Bytes read from files and disks: no more is no progress."""


class _Advance(NamedTuple):
    computed_s: float
    read_bytes: int | None
    """Bytes read from files and disks; None if the system does not count them."""
    moved: int

    def is_beyond(self, before: _Advance, config: StartupConfig) -> bool:
        return (
            self.computed_s - before.computed_s > config.idle_share * config.report_s
            or (self.read_bytes or 0) - (before.read_bytes or 0) > config.read_bytes
            or self.moved > before.moved
        )

    def __str__(self) -> str:
        read = "" if self.read_bytes is None else f", {self.read_bytes >> 20} MiB read"
        return f"getting ready: {self.computed_s:.0f} s computed{read}"


@contextlib.asynccontextmanager
async def reporting_progress(
    presence: RegistrationClient, config: StartupConfig = StartupConfig()
) -> AsyncIterator[None]:
    """Reports progress to the registry while it is open, after every `report_s` in which there was some."""
    transfer = RequestProgress()
    token = request_progress.present.set(transfer)
    try:
        async with background(_report(presence, transfer, config), name="progress of getting ready"):
            yield
    finally:
        request_progress.present.reset(token)


async def _report(presence: RegistrationClient, transfer: RequestProgress, config: StartupConfig) -> None:
    stand_alone()
    before = _advance(transfer)
    while True:
        await asyncio.sleep(config.report_s)
        now = _advance(transfer)
        if not now.is_beyond(before, config):
            continue
        before = now
        try:
            await presence.change(InstanceState.PENDING, str(now))
        except DmscError as error:  # the next report says the same
            log.info("progress not reported", sid=presence.record.sid, reason=error.text)


def _advance(transfer: RequestProgress) -> _Advance:
    return _Advance(time.process_time(), _read_bytes(), transfer.so_far)


def _read_bytes() -> int | None:
    try:
        return int(psutil.Process().io_counters().read_chars)
    except (psutil.Error, AttributeError):  # no such count on this system, or no right to read it
        return None
