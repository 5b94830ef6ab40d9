"""MG and SR report each job's quality of service in their cluster (draft §4.3 Type 5 upward, §4.4(6))."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.presence.registry_view import RegistryFollower
from entities.qos.policy_book import PolicyBook
from entities.qos.window import QosWindow
from schemas.errors import DmscError
from schemas.registry import InstanceState
from schemas.signals import LinkReport, TerminationReport

log = get_logger("qos-reporter")


class QosReporter:
    """Sends the Type 5 reports of one gateway or router, every `every_s` for each job with a policy."""

    def __init__(
        self,
        bus: Bus,
        *,
        sid: str,
        cluster: str,
        book: PolicyBook,
        window: QosWindow,
        follower: RegistryFollower,
        every_s: float,
        links: Callable[[str], tuple[LinkReport, ...]] = lambda job: (),
        energy_j: Callable[[str], float | None] = lambda job: None,
    ) -> None:
        self._bus = bus
        self._sid = sid
        self._cluster = cluster
        self._book = book
        self._window = window
        self._follower = follower
        self._every_s = every_s
        self._links = links
        self._energy_j = energy_j

    async def run(self) -> None:
        """Report until cancelled; a report that can't be sent is dropped."""
        dropped = self._bus.counters.dropped
        while True:
            await asyncio.sleep(self._every_s)
            lost, dropped = self._bus.counters.dropped - dropped, self._bus.counters.dropped
            for job in list(self._book.active):
                instances = self._follower.view.instances(job=job, cluster=self._cluster)
                report = self._window.report(
                    job,
                    sid=self._sid,
                    cluster=self._cluster,
                    window_s=self._every_s,
                    instances=sum(record.state is InstanceState.ACTIVE for record in instances),
                    lost=lost,
                ).model_copy(update={"links": self._links(job), "energy_j": self._energy_j(job)})
                try:
                    await self._bus.publish(subjects.QOS_REPORT, report, sid=self._sid)
                except DmscError as error:
                    log.info("type 5 not sent", code=error.code, error=error.text)

    async def end(self, job: str, note: str) -> None:
        """Send the termination report of a job to SMO and SRD: its totals, and what was removed (`note`)."""
        microbatches, sent_bytes = self._window.forget(job)
        report = TerminationReport(
            sid=self._sid, job=job, microbatches=microbatches, bytes=sent_bytes, note=note
        )
        await self._bus.publish(subjects.TERMINATION, report, job=job, sid=self._sid)
