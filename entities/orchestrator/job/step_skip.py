"""Leaving out a step (ADR-0012): members with the state forget it, then record and commit the decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from bus.logs import get_logger
from bus.subjects import STEP_ABORT, STEP_COMMIT
from entities.orchestrator.job_state.decision_record import DecisionRecord
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.step.step_orders import COMMIT_DEADLINE_S, commit_order
from schemas.errors import DmscError, Fenced
from schemas.step import Member, StepAbort, StepDecision

log = get_logger("orchestrator")

ABORT_DEADLINE_S = 20.0


class StepSkip:
    """Leaves out one step while no step loop runs. `losing` is called for members that do not answer."""

    def __init__(
        self,
        instances: JobInstances,
        record: DecisionRecord,
        epoch: int,
        losing: Callable[[Iterable[Member], str], None],
    ) -> None:
        self._instances = instances
        self._record = record
        self._epoch = epoch
        self._losing = losing

    async def clear(self, step: int, attempt: int, members: Iterable[Member]) -> None:
        """Has members forget what they have of the step; afterwards each is at `attempt`, or lost."""
        order = StepAbort(
            job=self._record.job,
            epoch=self._epoch,
            step=step,
            attempt=attempt,
            fenced=tuple(sorted(self._instances.lost, key=lambda member: (member.sid, member.incarnation))),
        )
        await asyncio.gather(
            *(
                self._answered(
                    member,
                    self._instances.order(STEP_ABORT, order, [member], deadline_s=ABORT_DEADLINE_S),
                )
                for member in members
            )
        )

    async def carry_out(self, decision: StepDecision) -> None:
        """Records the decision, then has all members commit it. A member that does not answer is lost.

        Raises:
            Fenced: another orchestrator leads this job.
        """
        await self._record.write(decision)
        await asyncio.gather(
            *(
                self._answered(
                    member,
                    self._instances.order(
                        STEP_COMMIT,
                        commit_order(decision, stage, self._epoch),
                        [member],
                        deadline_s=COMMIT_DEADLINE_S,
                        moving=True,
                    ),
                )
                for stage, members in enumerate(decision.membership)
                for member in members
            )
        )

    async def _answered(self, member: Member, order: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            await order
        except Fenced:
            raise
        except DmscError as error:
            log.warning("a step is left out without it", sid=member.sid, reason=str(error))
            self._losing([member], str(error))
