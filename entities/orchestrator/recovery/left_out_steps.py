"""Open steps that were given up: left out for good (ADR-0012), or forgotten and begun again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from bus.logs import get_logger
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.quarantine import BadMicrobatch, skip_decision
from entities.orchestrator.recovery.failure_handling import FailureHandling
from entities.orchestrator.step.member_orders import MemberOrders
from entities.orchestrator.step.step_owner import StepOwner
from entities.orchestrator.transaction.step_events import in_order
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.errors import DmscError
from schemas.step import Member

log = get_logger("orchestrator")


class LeftOutSteps:
    """Leaves steps of one job out, or has them begin again.

    `reopen` opens the step from which those go on that have the state.
    """

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        failures: FailureHandling,
        reopen: Callable[[ResumePoint], Awaitable[None]],
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self._failures = failures
        self._reopen = reopen
        self._orders = MemberOrders(job)

    async def leave_out(self, bad: BadMicrobatch) -> None:
        """Leaves the present step out: members with the state forget it, then commit the decision.

        A member that does not answer is lost; other members join later.

        Raises:
            StageGone: no member of a stage has the state.
        """
        resume_point = await self._forgotten()
        if all(resume_point.stages):
            decision = skip_decision(self._job.name, self._job.epoch, resume_point, bad)
            await self._job.tasks.unless_failed(self._job.decisions.write(decision))
            await self._job.tasks.unless_failed(self._orders.commit(decision, self._silent))
            self._step_owner.step = bad.step + 1
            self._failures.skipped(bad)
            resume_point = self._step_owner.living(replace(resume_point, step=bad.step + 1))
        await self._reopen(resume_point)

    async def put_back(self) -> None:
        """Has the open step, which was given up, forgotten: all are at its beginning, and it begins again.

        Raises:
            StageGone: no member of a stage has the state.
        """
        await self._reopen(await self._forgotten())

    async def _forgotten(self) -> ResumePoint:
        """Closes the loop, and has members with the state forget the open step; returns who goes on."""
        closed = await self._step_owner.close()
        resume_point = self._step_owner.living(closed)
        abort = self._orders.abort(
            resume_point.everyone,
            step=closed.step,
            attempt=closed.attempt,
            fenced=in_order(self._job.instances.lost),
            on_silent=self._silent,
        )
        await self._job.tasks.unless_failed(abort)
        return self._step_owner.living(resume_point)

    def _silent(self, member: Member, error: DmscError) -> None:
        log.warning("member lost: it did not leave the step out", sid=member.sid, reason=str(error))
        self._failures.losing([member], str(error))
