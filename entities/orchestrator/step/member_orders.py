"""The orders of the step transaction that end an attempt or a step: fence, abort, commit.

The step loop, a skipped step, a roll-back and a takeover give them in the same way; they differ in what
follows for a member that does not carry one out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from bus.logs import get_logger
from bus.subjects import STEP_ABORT, STEP_COMMIT, STEP_FENCE
from entities.orchestrator.job_state.context import JobContext
from schemas.errors import DmscError, Fenced
from schemas.step import Member, StepAbort, StepCommit, StepDecision, StepFence, StepFenced

log = get_logger("orchestrator")

OnSilent = Callable[[Member, DmscError], None]
"""Called at once for each member that does not carry an order out."""


class MemberOrders:
    """Gives these orders for one job. `Fenced` is raised by all: another orchestrator leads the job."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._times = job.times.steps

    async def fence(
        self, members: Iterable[Member], *, step: int, attempt: int, round: int, fenced: tuple[Member, ...]
    ) -> dict[str, StepFenced]:
        """Has members ignore `fenced` from now on; returns what each holds, by SID.

        Raises:
            MemberLost: some did not answer.
            DmscError: one refused.
        """
        order = StepFence(
            job=self._job.name,
            epoch=self._job.epoch,
            step=step,
            attempt=attempt,
            round=round,
            fenced=fenced,
        )
        return await self._job.instances.order(STEP_FENCE, order, members, deadline_s=self._times.fence_s)

    async def withdraw(
        self, newcomers: tuple[Member, ...], source: Member, *, step: int, attempt: int
    ) -> None:
        """Fences newcomers at their source. The fence has round 0: its answer repairs no paths."""
        try:
            await self.fence([source], step=step, attempt=attempt, round=0, fenced=newcomers)
        except Fenced:
            raise
        except DmscError as error:  # a source at another step has fenced them nevertheless
            log.info("newcomers not fenced", job=self._job.name, sid=source.sid, reason=str(error))

    async def abort(
        self,
        members: Iterable[Member],
        *,
        step: int,
        attempt: int,
        fenced: tuple[Member, ...],
        on_silent: OnSilent,
        moving: bool = False,
    ) -> None:
        """Has members forget what they have of the step; afterwards each is at `attempt`, or silent.

        With `moving` the deadline counts from the last progress.
        """
        order = self._abort(step, attempt, fenced)
        await asyncio.gather(
            *(
                self._carried_out(
                    member,
                    self._job.instances.order(
                        STEP_ABORT, order, [member], deadline_s=self._times.abort_s, moving=moving
                    ),
                    on_silent,
                )
                for member in members
            )
        )

    async def abort_all(
        self, members: Iterable[Member], *, step: int, attempt: int, fenced: tuple[Member, ...]
    ) -> None:
        """Has all members forget what they have of the step, or none counts as done.

        Raises:
            MemberLost: some did not answer.
            DmscError: one refused.
        """
        order = self._abort(step, attempt, fenced)
        await self._job.instances.order(STEP_ABORT, order, members, deadline_s=self._times.abort_s)

    async def commit(self, decision: StepDecision, on_silent: OnSilent) -> None:
        """Has every member of a decision apply it."""
        await asyncio.gather(
            *(
                self.commit_at(member, decision, stage, on_silent)
                for stage, members in enumerate(decision.membership)
                for member in members
            )
        )

    async def commit_at(
        self, member: Member, decision: StepDecision, stage: int, on_silent: OnSilent
    ) -> None:
        """Has one member of `stage` apply a decision."""
        order = commit_order(decision, stage, self._job.epoch)
        await self._carried_out(
            member,
            self._job.instances.order(
                STEP_COMMIT, order, [member], deadline_s=self._times.commit_s, moving=True
            ),
            on_silent,
        )

    def _abort(self, step: int, attempt: int, fenced: tuple[Member, ...]) -> StepAbort:
        return StepAbort(job=self._job.name, epoch=self._job.epoch, step=step, attempt=attempt, fenced=fenced)

    async def _carried_out(
        self, member: Member, order: Coroutine[Any, Any, object], on_silent: OnSilent
    ) -> None:
        try:
            await order
        except Fenced:
            raise
        except DmscError as error:
            on_silent(member, error)


def commit_order(decision: StepDecision, stage: int, epoch: int) -> StepCommit:
    """The order that has members of `stage` apply a decision, by the orchestrator of `epoch`."""
    return StepCommit(
        job=decision.job,
        epoch=epoch,
        step=decision.step,
        attempt=decision.attempt,
        generation=decision.generations[stage],
        checksum=decision.checksums[stage],
        clip=decision.clip,
        action=decision.action,
        quarantined=decision.quarantined,
        learning_rate=decision.learning_rate,
    )
