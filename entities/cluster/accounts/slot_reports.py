"""Sends a node's reports to the accountant: on each change, and every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from bus import subjects
from bus.connection import Bus
from entities.cluster.accounts.slot_meter import SlotMeter
from entities.cluster.config import ClusterConfig
from entities.cluster.core import ProcessLedger
from schemas.accounts import SlotReport
from schemas.errors import DmscError
from schemas.telemetry import InstanceSample


class SlotReports:
    """A node's reports.

    Args:
        bus: the bus.
        config: the agent's settings.
        ledger: who holds which slot now.
    """

    def __init__(self, bus: Bus, config: ClusterConfig, ledger: Callable[[], ProcessLedger]) -> None:
        self._bus = bus
        self._config = config
        self._ledger = ledger
        self._meter = SlotMeter()
        self._changed = asyncio.Event()
        self._number = 0
        self._epoch_s = time.time() - time.monotonic()

    def _now(self) -> float:
        """The time by a clock that nobody sets, which began as the system's."""
        return self._epoch_s + time.monotonic()

    def look(self) -> None:
        """Slots or their holders may have changed: call it at once, since what counts is when it happens."""
        ledger = self._ledger()
        if self._meter.look(ledger.slots, ledger.instances.values(), self._now()):
            self._changed.set()

    def take(self, sample: InstanceSample) -> None:
        """An instance's sample."""
        self._meter.take(sample)

    async def run(self) -> None:
        """Report until cancelled; see `last` for the end."""
        while True:
            self._changed.clear()
            await self._report()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.account_every_s):
                    await self._changed.wait()

    async def last(self) -> None:
        """Tells what is not told yet; at the end, when no instance is left."""
        self.look()
        await self._report()

    async def _report(self) -> None:
        now, config = self._now(), self._config
        offers = self._meter.offers(now)
        if not offers:
            return
        report = SlotReport(
            cluster=config.cluster,
            node=config.node,
            incarnation=self._bus.sender.incarnation,
            number=self._number,
            at=now,
            slots=offers,
            stretches=self._meter.stretches(now),
        )
        self._number += 1
        with suppress(DmscError):  # the next report says the same, and more
            await self._bus.publish(subjects.SLOT_REPORT, report, agent=config.sid)
