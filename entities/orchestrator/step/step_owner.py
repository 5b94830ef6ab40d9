"""How far a job is: its open step, and the step loop that runs it, if there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.retry_limits import StepBroken
from entities.orchestrator.step.step_loop import StepLoop
from entities.orchestrator.step.step_observer import StepObserver
from entities.orchestrator.transaction.step_events import NewcomerReady, Relaid, in_order
from entities.orchestrator.transaction.step_ledger import UpdateRule
from entities.orchestrator.transaction.step_machine import StepMachine
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.learning_rate import learning_rate
from schemas.step import Member
from schemas.task_graph import ENTRY, is_before_entry


class StepOwner:
    """Opens a step loop where the job stands, and closes it. `pauses(step)`: whether to pause before a step.

    While no loop runs, news about members is dropped: the next loop opens with those that live then.
    """

    def __init__(self, job: JobContext, observer: StepObserver, pauses: Callable[[int], bool]) -> None:
        self._job = job
        self._observer = observer
        self._pauses = pauses
        self._loop: StepLoop | None = None
        self._open_loop = AsyncExitStack()
        self._last_attempt = 0
        self.step = 0
        self.transfers = itertools.count(1)
        """Numbers of state transfers to newcomers."""
        job.instances.layouts.on_change = self._relaid

    # --- the loop -------------------------------------------------------------------------------------
    async def open(self, resume_point: ResumePoint) -> None:
        machine = StepMachine(
            job=self._job.name,
            epoch=self._job.epoch,
            microbatches=self._job.spec.training.microbatches,
            clip_norm=self._job.spec.training.clip_norm,
            stages=resume_point.stages,
            data=resume_point.data,
            pauses=self._pauses,
            update=self._update,
            step=resume_point.step,
            attempt=resume_point.attempt,
            generation=resume_point.generation,
            transfers=self.transfers,
            tied=self._job.instances.graph.tied_stages,
        )
        self._loop = StepLoop(self._job, machine, self._observer)
        await self._open_loop.enter_async_context(self._loop)
        for member in in_order(self._job.instances.lost):
            self.lost(member)

    async def close(self) -> ResumePoint:
        """Ends the loop; returns where the next begins: new attempt, new generations, the same members."""
        loop, self._loop = self.loop, None
        machine = loop.machine
        self._last_attempt = machine.attempt
        await self._open_loop.aclose()
        return ResumePoint(
            step=self.step,
            attempt=machine.attempt + 1,
            generation=max(machine.generations) + 1,
            stages=machine.stages,
            data=machine.data,
        )

    @property
    def running(self) -> bool:
        return self._loop is not None

    @property
    def loop(self) -> StepLoop:
        assert self._loop is not None
        return self._loop

    def lost(self, member: Member) -> None:
        if self._loop is not None and not self._job.instances.is_before_entry(member):
            self._loop.lost(member)

    def arrived(self, newcomer: Member, stage: int) -> None:
        if self._loop is not None and not is_before_entry(stage):
            self._loop.post(NewcomerReady(newcomer, stage))

    def _relaid(self, stage: int) -> None:
        """A stage's sums are to be reduced in another layout."""
        if self._loop is not None:  # else the next loop forms all groups anew
            self._loop.post(Relaid(stage))

    def give_up(self, why: str) -> None:
        """Gives up the open step and ends the loop, if the step is not decided yet."""
        if self._loop is not None:
            self._loop.give_up(self.step, why)

    def break_off(self, error: StepBroken) -> None:
        """Ends the loop at once: all go back to the checkpoint. If no loop runs, they do so already."""
        if self._loop is not None:
            self._loop.break_off(error)

    def _update(self, step: int) -> UpdateRule:
        """The rate of a step, unless it is a function of the user's, which instances call; and the end."""
        training, record = self._job.spec.training, self._job.store.record
        users = training.schedule.factory is not None
        rate = None if users else learning_rate(step, training, record.progress.drops)
        return UpdateRule(learning_rate=rate, stop=record.last_step)

    # --- where it is ----------------------------------------------------------------------------------
    @property
    def at_end(self) -> bool:
        """Whether the last step is committed."""
        return self.step >= self._job.store.record.last_step

    @property
    def attempt(self) -> int:
        """The present attempt of the open step."""
        return self._loop.machine.attempt if self._loop is not None else self._last_attempt

    @property
    def stages(self) -> tuple[tuple[Member, ...], ...]:
        """The living members that hold the state of the present version, by stage."""
        return tuple(self._living(members) for members in self.loop.machine.stages)

    @property
    def data(self) -> tuple[Member, ...]:
        return self._living(self.loop.machine.data)

    def afresh(self, crew: Collection[Member], attempt: int = 0, generation: int = 0) -> ResumePoint:
        """Where a loop begins whose members are `crew`: at the present step, of which nothing was begun."""
        members = self._job.instances.members
        data = [members.get(unit.sid) for unit in self._job.instances.units if unit.stage == ENTRY]
        return ResumePoint(
            step=self.step,
            attempt=attempt,
            generation=generation,
            stages=[[member for member in stage if member in crew] for stage in self._job.instances.stages()],
            data=[member for member in data if member is not None and member in crew],
        )

    def living(self, resume_point: ResumePoint) -> ResumePoint:
        """The same as `resume_point`, without members that are lost."""
        return replace(
            resume_point,
            stages=tuple(self._living(members) for members in resume_point.stages),
            data=self._living(resume_point.data),
        )

    def _living(self, members: Iterable[Member]) -> tuple[Member, ...]:
        return tuple(member for member in members if member not in self._job.instances.lost)
