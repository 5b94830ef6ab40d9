"""Taking over a job with living instances from a former orchestrator (DESIGN §5 rule 7)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from bus.logs import get_logger
from bus.subjects import ADOPT, REGISTRY_RECORD
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.step.member_orders import MemberOrders
from entities.orchestrator.transaction.takeover_rules import ResumePoint, find_resume_point, outsiders
from schemas.errors import DmscError, NewerRecord, UnreadableRecord
from schemas.registry import InstanceState, ServiceRecord
from schemas.step import Adopt, Adopted, Member, StepDecision
from schemas.task_graph import is_before_entry

log = get_logger("orchestrator")

OVER = (InstanceState.FAULTED, InstanceState.GONE)


class TakeoverService:
    """Finds out at which step a job's instances are, and brings them all to one step."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._orders = MemberOrders(job)

    async def find_resume_point(self) -> ResumePoint | None:
        """Takes the record, adopts instances that answer, commits the last decision, clears the open step.

        Returns:
            Where the job goes on; None if no stage instance lives, or the last decision can't be read.

        Raises:
            Fenced: a later orchestrator leads this job.
        """
        decision = await self._job.decisions.take()
        if self._job.decisions.unknown:
            log.error("job not adopted: its decision record can't be read", job=self._job.name)
            return None
        records = await self._registered()
        members = [_member(record) for record in records if record.state not in OVER]
        answers = [answer for answer in await asyncio.gather(*map(self._adopt, members)) if answer]
        roles = {member: self._job.instances.graph.unit(member.sid).stage for member in members}
        stages = 1 + max(unit.stage for unit in self._job.instances.units)
        aside = {answer.member for answer in answers if is_before_entry(roles[answer.member])}
        answers = [answer for answer in answers if answer.member not in aside and self._is_cut_so(answer)]
        resume_point = find_resume_point(decision, answers, roles, stages)
        if not any(resume_point.stages):
            return None
        fenced = outsiders(
            (member for record in records if (member := _member(record)) not in aside), resume_point
        )
        if decision is not None:
            attempts = {answer.member: answer.attempt for answer in answers}
            await asyncio.gather(
                *(
                    self._commit(decision, roles[member], member, attempts[member], fenced)
                    for member in resume_point.recommit
                )
            )
        everyone = resume_point.everyone
        self._job.instances.members = {member.sid: member for member in (*everyone, *aside)}
        await self._orders.abort(
            everyone,
            step=resume_point.step,
            attempt=resume_point.attempt,
            fenced=fenced,
            on_silent=self._silent,
            moving=True,
        )
        log.info(
            "job adopted",
            job=self._job.name,
            epoch=self._job.epoch,
            step=resume_point.step,
            instances=len(everyone),
        )
        return resume_point

    async def _registered(self) -> list[ServiceRecord]:
        """The newest incarnation of each unit, as the registry has it."""
        records = []
        for unit in self._job.instances.graph.units:
            try:
                entry = await self._job.bus.bucket(REGISTRY_RECORD).get(sid=unit.sid)
            except (UnreadableRecord, NewerRecord) as error:  # it counts as lost, and is replaced
                log.warning("not adopted", job=self._job.name, sid=unit.sid, reason=error.text)
                continue
            if entry is not None:
                assert isinstance(entry.message, ServiceRecord)
                records.append(entry.message)
        return records

    async def _adopt(self, member: Member) -> Adopted | None:
        plan = self._job.instances.graph.revision
        order = Adopt(job=self._job.name, epoch=self._job.epoch, plan=plan)
        try:
            answer = await self._job.bus.command(
                ADOPT,
                order,
                deadline_s=self._job.times.run.adopt_s,
                while_heard=True,
                job=self._job.name,
                sid=member.sid,
            )
        except DmscError as error:
            log.warning("not adopted", job=self._job.name, sid=member.sid, reason=str(error))
            return None
        return answer if answer.member == member else None

    def _is_cut_so(self, answer: Adopted) -> bool:
        """Whether an instance has the layers of the plan in force; one that has others is replaced."""
        plan = self._job.instances.graph.revision
        if answer.plan in (None, plan):
            return True
        log.warning("not adopted", job=self._job.name, sid=answer.member.sid, plan=answer.plan, in_force=plan)
        return False

    async def _commit(
        self, decision: StepDecision, stage: int, member: Member, attempt: int, fenced: Iterable[Member]
    ) -> None:
        """Has a member commit the decision; fences newcomers first: a commit waits for their transfers."""
        voters = {voter for members in decision.membership for voter in members}
        newcomers = tuple(other for other in fenced if other not in voters)
        if newcomers:
            await self._orders.withdraw(newcomers, member, step=decision.step, attempt=attempt)
        await self._orders.commit_at(member, decision, stage, self._silent)

    def _silent(self, member: Member, error: DmscError) -> None:
        """An instance that does not carry out an order is lost, and the step loop fences it."""
        log.warning("not adopted", job=self._job.name, sid=member.sid, reason=str(error))
        self._job.instances.mark_lost(member)


def _member(record: ServiceRecord) -> Member:
    return Member(sid=record.sid, incarnation=record.incarnation)
