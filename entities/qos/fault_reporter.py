"""MG and SR report faults to the orchestrator until it acknowledges them (draft §4.4(5), §5.5).

A report is a hint: only the orchestrator decides. The death of an incarnation is reported once, and so is
each error count of its device. A broken link, a failed request or slowness can happen again to the same
incarnation, so it is reported again after `again_s`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.wire.correlation import correlate, current_cause
from schemas.errors import DmscError, Unavailable
from schemas.fault import FaultReport
from schemas.registry import ServiceRecord

log = get_logger("faults")


@dataclass(frozen=True, kw_only=True)
class FaultReporterConfig:
    """Timing and bounds of fault reports."""

    deadline_s: float = 30.0  # of one command, which repeats itself; after it a new one is sent
    again_s: float = 5.0  # a link or request fault of the same incarnation is reported again after this
    queue: int = 1024  # waiting reports; beyond it the newest are dropped and counted
    at_once: int = 16  # reports sent concurrently
    give_up_s: float = 300.0  # a report this old is useless
    remembered: int = 4096  # (sid, incarnation, kind) reported before


def death_of(record: ServiceRecord, reporter: str) -> FaultReport:
    """The report of an instance whose record says that it is faulted."""
    return FaultReport(
        reporter=reporter,
        job=record.job,
        sid=record.sid,
        incarnation=record.incarnation,
        kind="instance",
        evidence=f"registry says faulted: {record.reason or 'no reason given'}",
    )


class FaultLedger:
    """The faults that were reported before. Pure: the time comes in."""

    def __init__(self, config: FaultReporterConfig) -> None:
        self._config = config
        self._reported: OrderedDict[tuple[str, ...], float] = OrderedDict()

    def is_news(self, report: FaultReport, now: float) -> bool:
        """Whether this report is new or due again; if so it counts as reported."""
        key: tuple[str, ...] = (report.sid, report.incarnation, report.kind)
        if report.device is not None:
            key = (*key, str(report.device))
        if report.kind == "unreachable" or report.silent:
            # a report by a witness that is fenced itself must not suppress another witness's report
            key = (*key, f"from {report.witness}", str(report.silent))
        reported_at = self._reported.get(key)
        if reported_at is not None and (
            report.kind in ("instance", "node", "device") or now - reported_at < self._config.again_s
        ):
            return False
        self._reported[key] = now
        self._reported.move_to_end(key)
        while len(self._reported) > self._config.remembered:
            self._reported.popitem(last=False)
        return True


class FaultReporter:
    """Queues reports and sends each until it is acknowledged."""

    def __init__(self, bus: Bus, config: FaultReporterConfig | None = None) -> None:
        self._bus = bus
        self._config = config or FaultReporterConfig()
        self._ledger = FaultLedger(self._config)
        self._queue: asyncio.Queue[tuple[FaultReport, str | None]] = asyncio.Queue(self._config.queue)
        self.dropped = 0

    def report(self, report: FaultReport) -> bool:
        """Queue a report; False if it was reported before or the queue is full."""
        if not self._ledger.is_news(report, asyncio.get_running_loop().time()):
            return False
        try:
            self._queue.put_nowait((report, current_cause()))
        except asyncio.QueueFull:
            self.dropped += 1
            return False
        log.warning("fault seen", **report.model_dump(exclude={"reporter"}))
        return True

    async def run(self) -> None:
        """Send reports until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._config.at_once):
                tasks.create_task(self._send_each(), name=f"fault-reporter-{number}")

    async def _send_each(self) -> None:
        while True:
            report, cause = await self._queue.get()
            correlate(None, cause=cause)  # the message in which it was seen
            await self._send(report)

    async def _send(self, report: FaultReport) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.give_up_s
        while loop.time() < end:
            try:
                await self._bus.command(
                    subjects.FAULT_REPORT, report, deadline_s=self._config.deadline_s, sid=report.reporter
                )
                return
            except Unavailable as error:
                log.warning("fault not reported yet", sid=report.sid, code=error.code, error=error.text)
                await asyncio.sleep(1.0)  # an error that comes back at once must not spin
            except DmscError as error:
                log.error("fault report declined", sid=report.sid, code=error.code, error=error.text)
                return
        log.error("fault report given up", sid=report.sid, after_s=self._config.give_up_s)
