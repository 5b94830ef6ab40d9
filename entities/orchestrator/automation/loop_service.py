"""Calls the orchestrator's own loop for each running job, and has its suggestions judged like a module's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from bus.logs import get_logger
from entities.orchestrator.automation.loop_memory import LoopMemory, LoopRules
from entities.orchestrator.automation.own_loop import adopted, evaluate, looks_slow
from entities.orchestrator.automation.remedies import Remedy
from entities.orchestrator.automation.situation_reading import free_slots, read_situation
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.queue.job_queue import JobQueue
from schemas.actions import scope_of
from schemas.automation import OWN_LOOP, Automation, lower
from schemas.errors import DmscError
from schemas.job import JobState
from schemas.policy import PolicySuggestion

log = get_logger("orchestrator")

VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """When the loop looks, in seconds."""

    every_s: float = 1.0
    """Between looks. One takes a fraction of a millisecond, but for a job that a better cut is sought for."""
    homeless_s: float = 10.0
    """How long a replica waits for a slot before a job whose size may vary does without it. A node that is
    started anew is back sooner."""


class OwnLoop:
    """The loop of one term.

    `runs`: the running jobs by id; `desk`: the service that judges suggestions; `confirmed` returns while
    this orchestrator leads.
    """

    def __init__(
        self,
        runs: Mapping[str, JobRun],
        mesh: MeshView,
        queue: JobQueue,
        desk: PolicyService,
        confirmed: Callable[[], Awaitable[None]],
        rules: LoopRules = LoopRules(),
        times: LoopTimes = LoopTimes(),
    ) -> None:
        self._times = times
        self._runs = runs
        self._mesh = mesh
        self._queue = queue
        self._desk = desk
        self._confirmed = confirmed
        self._rules = rules
        self._memory: dict[str, LoopMemory] = {}
        self._homeless_since: dict[str, float] = {}

    async def run(self) -> None:
        """Looks at all jobs each second, until cancelled."""
        while True:
            await asyncio.sleep(self._times.every_s)
            await self._confirmed()
            self._memory = {job: each for job, each in self._memory.items() if job in self._runs}
            for run in list(self._runs.values()):
                await asyncio.sleep(0)  # others have the loop between two jobs
                try:
                    await self._look(run, time.monotonic())
                except DmscError as error:  # the bus is away; it is looked at again in a second
                    log.warning("own loop", job=run.name, reason=error.text)
                except Exception as error:  # in the term's group it would end all jobs
                    log.error("own loop failed", job=run.name, exc_info=error)

    async def _look(self, run: JobRun, now: float) -> None:
        if lower(self._mesh.automation, run.job.store.record.automated) is Automation.OFF:
            self._memory.pop(run.name, None)
            return
        if self._gives_up_room(run, now):
            return
        situation = read_situation(run, self._mesh, now)
        if situation is None:
            if run.name in self._memory:
                self._memory[run.name] = replace(self._memory[run.name], since={})
            return
        memory = self._memory.get(run.name, LoopMemory())
        if looks_slow(situation, memory):
            situation = replace(situation, free=tuple(free_slots(run, self._mesh, self._queue)))
        remedies, memory = evaluate(situation, memory, now, self._rules)
        self._memory[run.name] = memory
        for remedy in remedies:
            outcome = await self._desk.consider(_suggestion(run, remedy))
            log.info(
                "own loop", job=run.name, suggests=remedy.key, adopted=outcome.adopted, reason=outcome.reason
            )
            if outcome.adopted:
                self._memory[run.name] = adopted(self._memory[run.name], remedy.key, self._rules)

    def _gives_up_room(self, run: JobRun, now: float) -> bool:
        """Has a job whose size may vary go on with the replicas that it has, if others find no room for long.

        Else it would wait for slots that have left, and would be changed in no other way meanwhile.
        """
        within, homeless = run.job.spec.parallel.replica_range, run.training.changes.homeless
        if within is None or not homeless:
            self._homeless_since.pop(run.name, None)
            return False
        since = self._homeless_since.setdefault(run.name, now)
        if now - since < self._times.homeless_s or run.job.store.record.state is not JobState.RUNNING:
            return False
        graph = run.job.instances.graph
        stages = range(len(graph.cuts))
        there = [
            sum(not unit.standby and unit.sid not in homeless for unit in graph.stage(s)) for s in stages
        ]
        if min(there) < within.min or run.holding.replicas <= min(there):
            return False
        del self._homeless_since[run.name]
        why = f"{', '.join(sorted(homeless))} found no room for {self._times.homeless_s:.0f} s"
        return run.holding.change_size(min(there), f"{OWN_LOOP}: {why}")


def _suggestion(run: JobRun, remedy: Remedy) -> PolicySuggestion:
    return PolicySuggestion(
        module=OWN_LOOP,
        version=VERSION,
        job=run.name,
        action=remedy.action,
        confidence=remedy.confidence,
        reason=remedy.reason,
        input_revision=run.step,
        valid_s=remedy.valid_s,
        scope=scope_of(remedy.action),
    )
