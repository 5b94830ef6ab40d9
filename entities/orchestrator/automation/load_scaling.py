"""Gives versions of services more and fewer replicas by what they are asked (ADR-0157).

It says how many a version needs; the queue gives the slots, by rank and as they are free. What a person has
set (`dmsc service scale`) stays until they release it (`dmsc policy automation JOB act`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.automation.served_load import ServedLoad
from entities.orchestrator.automation.version_load import ScaleDecision, ScaleMemory, decide
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.job.term import insistently
from schemas.actions import REPLICAS
from schemas.automation import OWN_LOOP, Automation
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.job import JobState
from schemas.services.figures import ServiceFigures

log = get_logger("orchestrator")


@dataclass(frozen=True, kw_only=True)
class ScalingTimes:
    """When versions are looked at, in seconds."""

    every_s: float = 1.0
    """Between looks; gateways tell what has changed as often."""
    figures_s: float = 2.0
    """Within which the figures of gateways are here for a version that has just started, with who woke it."""


class LoadScaling:
    """The scaling of one term.

    Args:
        bus: The bus.
        runs: The running jobs by id.
        confirmed: Returns while this orchestrator leads.
        times: See there.
        clock: Seconds that only advance.
    """

    def __init__(
        self,
        bus: Bus,
        runs: Mapping[str, JobRun],
        confirmed: Callable[[], Awaitable[None]],
        times: ScalingTimes = ScalingTimes(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._runs = runs
        self._confirmed = confirmed
        self._times = times
        self._clock = clock
        self._load = ServedLoad()
        self._memory: dict[str, ScaleMemory] = {}
        self._advised: dict[str, int] = {}

    async def _take(self, message: ServiceFigures, envelope: Envelope) -> None:
        self._load.take(message, self._clock())

    async def run(self) -> None:
        """Hears gateways, and looks at all versions again and again, until cancelled."""
        figures = await insistently(partial(self._bus.subscribe, subjects.SERVICE_FIGURES, self._take))
        try:
            while True:
                await asyncio.sleep(self._times.every_s)
                await self._confirmed()
                await self._round()
        finally:
            await figures.stop(drain=False)

    async def _round(self) -> None:
        self._load.forget(set(self._load.jobs) - self._runs.keys())
        for job in self._memory.keys() - self._runs.keys():
            del self._memory[job]
        for job in self._advised.keys() - self._runs.keys():
            del self._advised[job]
        for run in list(self._runs.values()):
            try:
                await self._look(run, self._clock())
            except DmscError as error:  # the bus is away; it is looked at again in a second
                log.warning("not scaled", job=run.name, reason=error.text)
            except Exception as error:  # in the term's group it would end all jobs
                log.error("scaling failed", job=run.name, exc_info=error)

    async def _look(self, run: JobRun, now: float) -> None:
        serve, within = run.job.spec.serve, run.job.spec.parallel.replica_range
        if serve is None or within is None:
            return
        if not self._may_act(run):
            self._memory.pop(run.name, None)
            return
        memory = self._memory.get(run.name)
        if memory is None:  # it has just started, or another orchestrator led before
            memory = ScaleMemory(begun_at=now + self._times.figures_s)
        present = run.holding.preferred or max(within.want, run.holding.replicas)
        stages = {unit.sid: unit.stage for unit in run.job.instances.graph.units}
        load = self._load.of(run.name, stages, serve, now)
        decision, self._memory[run.name] = decide(load, present, within, serve.scale, memory, now)
        if decision is None:
            self._advised.pop(run.name, None)
        elif run.holding.automation is Automation.ADVISE:
            self._advise(run, decision, present)
        else:
            await self._act(run, decision, present)

    def _may_act(self, run: JobRun) -> bool:
        """Whether the load of a version may change it now; what was adopted ends if automation is off."""
        record, holding = run.job.store.record, run.holding
        pinned = any(pin.knob == REPLICAS for pin in record.pins)
        if holding.automation is not Automation.ACT and holding.preferred is not None and not pinned:
            holding.prefer(None)
        running = record.state is JobState.RUNNING and not record.held and not run.over
        return running and not pinned and holding.automation is not Automation.OFF

    def _advise(self, run: JobRun, decision: ScaleDecision, present: int) -> None:
        if self._advised.get(run.name) != decision.replicas:
            self._advised[run.name] = decision.replicas
            text = f"{OWN_LOOP} advises {decision.replicas} replicas instead of {present}: {decision.reason}"
            run.job.events.changed(text)
            log.info("scaling advised", job=run.name, replicas=decision.replicas, reason=decision.reason)

    async def _act(self, run: JobRun, decision: ScaleDecision, present: int) -> None:
        wanted, reason = decision.replicas, decision.reason
        if not wanted:
            if await run.parking.rest(reason):
                self._memory.pop(run.name, None)  # it may be woken before the next look
                log.info("version rests", job=run.name, reason=reason)
            return
        holding = run.holding
        holding.prefer(wanted)  # before it shrinks: else the queue would have it grow again
        if wanted < holding.replicas and not holding.change_size(wanted, f"{OWN_LOOP}: {reason}"):
            holding.prefer(present)
            return
        log.info("version scaled", job=run.name, before=present, replicas=wanted, reason=reason)
        if wanted > present:
            run.job.events.changed(f"{OWN_LOOP}: {wanted} replicas wanted instead of {present}: {reason}")
