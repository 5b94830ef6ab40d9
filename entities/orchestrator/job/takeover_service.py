"""Taking over a job with living instances from a former orchestrator (DESIGN §5 rule 7)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from bus.connection import Bus
from bus.logs import get_logger
from bus.subject import Subject
from bus.subjects import ADOPT, REGISTRY_RECORD, STEP_ABORT, STEP_COMMIT, STEP_FENCE
from entities.orchestrator.job_state.decision_record import DecisionRecord
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.step.step_orders import commit_order
from entities.orchestrator.transaction.takeover_rules import Settled, outsiders, settle
from schemas.base import Message
from schemas.errors import DmscError, NewerRecord, UnreadableRecord
from schemas.registry import InstanceState, ServiceRecord
from schemas.step import Adopt, Adopted, Member, StepAbort, StepDecision, StepFence

log = get_logger("orchestrator")

ADOPT_DEADLINE_S = 3.0
"""A living instance answers within milliseconds, whatever it computes."""
COMMIT_DEADLINE_S = 30.0
ABORT_DEADLINE_S = 20.0
FENCE_DEADLINE_S = 20.0
OVER = (InstanceState.FAULTED, InstanceState.GONE)


class TakeoverService:
    """Finds out at which step a job's instances are, and brings them all to one step."""

    def __init__(
        self, bus: Bus, mesh: MeshView, instances: JobInstances, record: DecisionRecord, epoch: int
    ) -> None:
        self._bus = bus
        self._mesh = mesh
        self._instances = instances
        self._record = record
        self._epoch = epoch

    async def settle(self) -> Settled | None:
        """Takes the record, adopts instances that answer, commits the last decision, clears the open step.

        Returns:
            Where the job goes on; None if no stage instance lives, or the last decision can't be read.

        Raises:
            Fenced: a later orchestrator leads this job.
        """
        assert self._instances.graph is not None
        decision = await self._record.take()
        if self._record.unknown:
            log.error("job not adopted: its decision record can't be read", job=self._record.job)
            return None
        records = await self._registered()
        members = [_member(record) for record in records if record.state not in OVER]
        answers = [answer for answer in await asyncio.gather(*map(self._adopt, members)) if answer]
        roles = {member: self._instances.graph.unit(member.sid).stage for member in members}
        stages = 1 + max(unit.stage for unit in self._instances.units)
        settled = settle(decision, answers, roles, stages, self._epoch)
        if not any(settled.stages):
            return None
        fenced = outsiders(map(_member, records), settled)
        if decision is not None:
            attempts = {answer.member: answer.attempt for answer in answers}
            await asyncio.gather(
                *(
                    self._commit(decision, roles[member], member, attempts[member], fenced)
                    for member in settled.recommit
                )
            )
        everyone = settled.everyone
        self._instances.members = {member.sid: member for member in everyone}
        order = StepAbort(
            job=self._record.job,
            epoch=self._epoch,
            step=settled.step,
            attempt=settled.attempt,
            fenced=fenced,
        )
        await asyncio.gather(*(self._abort(order, member) for member in everyone))
        log.info(
            "job adopted", job=self._record.job, epoch=self._epoch, step=settled.step, instances=len(everyone)
        )
        return settled

    async def _registered(self) -> list[ServiceRecord]:
        """The newest incarnation of each unit, as the registry has it."""
        assert self._instances.graph is not None
        records = []
        for unit in self._instances.graph.units:
            try:
                entry = await self._bus.bucket(REGISTRY_RECORD).get(sid=unit.sid)
            except (UnreadableRecord, NewerRecord) as error:  # it counts as lost, and is replaced
                log.warning("not adopted", job=self._record.job, sid=unit.sid, reason=error.text)
                continue
            if entry is not None:
                assert isinstance(entry.message, ServiceRecord)
                records.append(entry.message)
        return records

    async def _adopt(self, member: Member) -> Adopted | None:
        order = Adopt(job=self._record.job, epoch=self._epoch)
        try:
            answer = await self._bus.command(
                ADOPT,
                order,
                deadline_s=ADOPT_DEADLINE_S,
                while_heard=True,
                job=self._record.job,
                sid=member.sid,
            )
        except DmscError as error:
            log.warning("not adopted", job=self._record.job, sid=member.sid, reason=str(error))
            return None
        return answer if answer.member == member else None

    async def _commit(
        self, decision: StepDecision, stage: int, member: Member, attempt: int, fenced: Iterable[Member]
    ) -> None:
        """Has a member commit the decision; fences newcomers first: a commit waits for their transfers."""
        voters = {voter for members in decision.membership for voter in members}
        newcomers = tuple(other for other in fenced if other not in voters)
        if newcomers:
            fence = StepFence(
                job=self._record.job,
                epoch=self._epoch,
                step=decision.step,
                attempt=attempt,
                round=0,
                fenced=newcomers,
            )
            try:
                await self._instances.order(STEP_FENCE, fence, [member], deadline_s=FENCE_DEADLINE_S)
            except DmscError as error:  # the member may be further by now, and has fenced them nevertheless
                log.info("newcomers not fenced", sid=member.sid, reason=str(error))
        order = commit_order(decision, stage, self._epoch)
        await self._order(STEP_COMMIT, order, member, COMMIT_DEADLINE_S)

    async def _abort(self, order: StepAbort, member: Member) -> None:
        await self._order(STEP_ABORT, order, member, ABORT_DEADLINE_S)

    async def _order(self, row: Subject, order: Message, member: Member, deadline_s: float) -> None:
        """Gives an order; an instance that does not carry it out is lost, and the step loop fences it."""
        try:
            await self._instances.order(row, order, [member], deadline_s=deadline_s, moving=True)
        except DmscError as error:
            log.warning("not adopted", job=self._record.job, sid=member.sid, reason=str(error))
            self._instances.mark_lost(member)


def _member(record: ServiceRecord) -> Member:
    return Member(sid=record.sid, incarnation=record.incarnation)
