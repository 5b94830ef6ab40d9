"""Calls the orchestrator's own loop for each running job, and has its suggestions judged like a module's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from bus.logs import get_logger
from bus.tasks import TaskSet
from entities.orchestrator.automation.loop_memory import LoopMemory, LoopRules
from entities.orchestrator.automation.own_loop import adopted, evaluate, gains_elsewhere, renewed
from entities.orchestrator.automation.remedies import RECUT, Remedy
from entities.orchestrator.automation.situation import JobSituation
from entities.orchestrator.automation.situation_reading import (
    CutQuestion,
    MeshFigures,
    Paces,
    alike,
    best_cut,
    free_slots,
    mesh_figures,
    read_situation,
)
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.queue.job_queue import JobQueue
from entities.planner.planning_process import beside_the_loop
from schemas.actions import REPLICAS, scope_of
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
    """Between looks. One takes a tenth of a millisecond of the leader's loop."""
    learn_s: float = 120.0
    """Before the model of a job that was taken over is measured again, where that failed."""
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
        self._seeking = TaskSet()
        self._sought_now: set[str] = set()
        self._learn_at: dict[str, float] = {}  # when the model of a job is measured, if it is not known
        self._sought: dict[str, Paces] = {}  # by which figures no better cut was found

    async def run(self) -> None:
        """Looks at all jobs each second, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._times.every_s)
                await self._confirmed()
                self._forget_ended()
                await self._round()
        finally:
            await self._seeking.close()

    async def _round(self) -> None:
        """One look at each running job; others have the loop between two of them."""
        figures = cache(lambda: mesh_figures(self._mesh, self._queue))  # once for all, where one is looked at
        for run in list(self._runs.values()):
            await asyncio.sleep(0)
            await self._guarded(run, self._visit(run, figures))

    async def _visit(self, run: JobRun, figures: Callable[[], MeshFigures]) -> None:
        if self._looks_at(run, time.monotonic()):
            await self._look(run, figures(), time.monotonic())

    async def _guarded(self, run: JobRun, look: Awaitable[None]) -> None:
        try:
            await look
        except DmscError as error:  # the bus is away; it is looked at again in a second
            log.warning("own loop", job=run.name, reason=error.text)
        except Exception as error:  # in the term's group it would end all jobs
            log.error("own loop failed", job=run.name, exc_info=error)

    def _forget_ended(self) -> None:
        for of_jobs in (self._memory, self._sought, self._learn_at, self._homeless_since):
            for job in of_jobs.keys() - self._runs.keys():
                del of_jobs[job]

    def _looks_at(self, run: JobRun, now: float) -> bool:
        """Whether anything may be changed of a job, and nothing is being looked for already."""
        serves = run.job.spec.serve is not None  # it has no steps whose time could tell what a change brings
        if serves or lower(self._mesh.automation, run.job.store.record.automated) is Automation.OFF:
            self._memory.pop(run.name, None)
            return False
        run.holding.tell_limit()
        return run.name not in self._sought_now and not self._gives_up_room(run, now)

    async def _look(self, run: JobRun, figures: MeshFigures, now: float) -> None:
        seen = read_situation(run, self._mesh, figures, now)
        if seen is None:
            if run.name in self._memory:
                self._memory[run.name] = replace(self._memory[run.name], since={})
            return
        situation, question = seen
        if situation.uneven and run.model_analysis.known is None and now >= self._learn_at.get(run.name, 0.0):
            self._learn_at[run.name] = now + self._times.learn_s
            self._seeking.create(self._guarded(run, _model_of(run)), name=f"model {run.name}")
        memory = self._memory.get(run.name, LoopMemory())
        fastest = figures.idle[0].speed if figures.idle else 0.0
        if fastest and gains_elsewhere(situation, memory, fastest, self._rules):
            free = free_slots(run, self._mesh, self._queue, figures.idle)
            situation = replace(situation, free=tuple(free))
        if question is None or self._is_known(run, question, memory, now):
            await self._act(run, situation, now)
            return
        self._sought_now.add(run.name)
        self._seeking.create(self._guarded(run, self._seek(run, situation, question)), name=f"cut {run.name}")

    async def _seek(self, run: JobRun, situation: JobSituation, question: CutQuestion) -> None:
        """Looks for a better cut beside the loop, and then acts; meanwhile the job is not looked at."""
        try:
            found = await beside_the_loop(best_cut, question)
            if self._runs.get(run.name) is not run:
                return
            if found is None or found.then_ms > (1 - self._rules.stays) * found.now_ms:
                self._sought[run.name] = question.question.paces
            await self._act(run, replace(situation, best_cut=found), time.monotonic())
        finally:
            self._sought_now.discard(run.name)

    def _is_known(self, run: JobRun, question: CutQuestion, memory: LoopMemory, now: float) -> bool:
        """Whether a better cut was looked for in vain, by about the same figures, or may not be suggested."""
        pause = memory.pauses.get(RECUT)
        if pause is not None and now < pause.until:
            return True
        before = self._sought.get(run.name)
        if before is None or not alike(before, question.question.paces):
            self._sought.pop(run.name, None)
            return False
        return True

    async def _act(self, run: JobRun, situation: JobSituation, now: float) -> None:
        remedies, memory = evaluate(situation, self._memory.get(run.name, LoopMemory()), now, self._rules)
        self._memory[run.name] = memory
        for remedy in remedies:
            outcome = await self._desk.consider(_suggestion(run, remedy))
            log.info(
                "own loop", job=run.name, suggests=remedy.key, adopted=outcome.adopted, reason=outcome.reason
            )
            present = self._memory.get(run.name)
            if present is None:  # the job has ended meanwhile, or its automation was switched off
                return
            if outcome.adopted:
                self._memory[run.name] = adopted(present, remedy, now, self._rules)
            elif remedy.renews:
                self._memory[run.name] = renewed(present, remedy, now)

    def _gives_up_room(self, run: JobRun, now: float) -> bool:
        """Has a job whose size may vary go on with the replicas that it has, if others find no room for long.

        Else it would wait for slots that have left, and would be changed in no other way meanwhile. Where
        automation only advises, or a person has set the number of replicas, it waits.
        """
        within, homeless = run.job.spec.parallel.replica_range, run.training.changes.homeless
        may_act = run.holding.automation is Automation.ACT
        pinned = any(pin.knob == REPLICAS for pin in run.job.store.record.pins)
        if within is None or not homeless or not may_act or pinned:
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
        if min(there) < within.least or run.holding.replicas <= min(there):
            return False
        del self._homeless_since[run.name]
        why = f"{', '.join(sorted(homeless))} found no room for {self._times.homeless_s:.0f} s"
        return run.holding.change_size(min(there), f"{OWN_LOOP}: {why}")


async def _model_of(run: JobRun) -> None:
    """Has the model of a job measured that an earlier orchestrator began: else it is never cut anew."""
    await run.model_analysis.while_running()


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
