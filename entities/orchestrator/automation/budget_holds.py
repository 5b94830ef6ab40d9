"""Budgets that are used up hold the jobs of their user or tenant, or their service's versions (ADR-0128).

The accountant says which are; jobs that wait are held in the queue, and those that run park at the end of a
step, and wait there, too. Nobody has to resume them: once the budget has room again, they are in the queue
like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change, Watch
from schemas.accounts import BudgetState, BudgetUse
from schemas.job import JobRecord, JobState

log = get_logger("orchestrator")


class BudgetedJob(Protocol):
    """What of a running job matters here."""

    def present_record(self) -> JobRecord:
        """Its record."""

    def give_way(self, why: str) -> bool:
        """Has it park, and wait in the queue; False: not now."""


def hold_reason(record: JobRecord, used_up: Iterable[BudgetUse]) -> str:
    """Why a job may not run: the first budget of its user, tenant or service that is used up and stops."""
    tenant, serve = record.queue_share.tenant, record.spec.serve
    for use in used_up:
        budget = use.budget
        if budget.user:
            concerned = budget.user == record.user
        elif budget.service:
            concerned = serve is not None and budget.service == serve.service
        else:
            concerned = bool(tenant) and budget.tenant == tenant
        if concerned and budget.at_end == "stop" and use.state == "used up":
            return f"held: {use.why}"
    return ""


class BudgetHolds:
    """The budgets that are used up, as the accountant last said.

    Args:
        bus: the bus.
        jobs: the jobs that have not ended, by id.
        changed: called when other jobs may start than before.
        look_s: how often jobs are looked at that could not park when their budget was used up.
    """

    def __init__(
        self, bus: Bus, jobs: Mapping[str, BudgetedJob], changed: Callable[[], None], look_s: float = 2.0
    ) -> None:
        self._bus = bus
        self._jobs = jobs
        self._changed = changed
        self._look_s = look_s
        self._used_up: dict[str, BudgetUse] = {}
        self._news = asyncio.Event()
        self._current = asyncio.Event()
        self._watch: Watch | None = None

    def reason(self, record: JobRecord) -> str:
        """Why the job may not run now; empty: it may, as far as budgets go."""
        return hold_reason(record, self._used_up.values()) if self._used_up else ""

    async def load(self) -> None:
        """Reads what is used up, and follows it from then on."""
        if self._watch is None:
            self._watch = await self._bus.bucket(subjects.BUDGET_STATE).watch(self._on_change)
            await self._current.wait()

    async def _on_change(self, change: Change) -> None:
        if not change.key:
            self._current.set()
            return
        use = change.message.use if isinstance(change.message, BudgetState) else None
        before = self._used_up.pop(change.key, None)
        if use is not None and use.state == "used up" and use.budget.at_end == "stop":
            self._used_up[change.key] = use
            if before is None:
                log.warning("jobs are held", reason=use.why)
        if (change.key in self._used_up) != (before is not None):
            self._changed()
        self._news.set()

    async def run(self) -> None:
        """Parks running jobs whose budget is used up, until cancelled."""
        try:
            while True:
                self._news.clear()
                if self._park():
                    await asyncio.sleep(self._look_s)
                else:
                    await self._news.wait()
        finally:
            if self._watch is not None:
                await self._watch.stop()
                self._watch = None

    def _park(self) -> bool:
        """Has them park; returns whether jobs may have to later."""
        if not self._used_up:
            return False
        for run in list(self._jobs.values()):
            record = run.present_record()
            if record.state is not JobState.RUNNING:
                continue
            if (why := self.reason(record)) and run.give_way(why):
                log.info("job parks", job=record.job, reason=why)
        return True
