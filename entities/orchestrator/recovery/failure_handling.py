"""Failures in a job's training, and whether it makes sense to go on.

Everything that breaks a step is reported here. The retry limits, the quarantine and the limits of the fault
queue judge it; it is written to the job's events, and closed in the fault queue once the step is committed.
The unit of a lost member gets a new incarnation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from bus.logs import get_logger
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.quarantine import BadMicrobatch
from entities.orchestrator.job_state.retry_limits import StepBroken
from entities.orchestrator.recovery.fault_choices import FaultChoices
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.recovery.recovery_budget import RecoveryBudget
from entities.orchestrator.recovery.standbys import Standbys
from entities.orchestrator.step.step_owner import StepOwner
from schemas.step import Member

log = get_logger("orchestrator")


class FailureHandling:
    """Handles the failures of one job. A fatal one fails its tasks, or is raised to the step loop."""

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        joining: JoiningMembers,
        standbys: Standbys,
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self._joining = joining
        self._standbys = standbys
        self._lost_at: dict[Member, float] = {}
        self.choices = FaultChoices(job, step_owner, joining, self.lost)
        record = job.store.record
        self._budget = RecoveryBudget(job.name, record.spec.recovery, record.code_failures)

    # --- members --------------------------------------------------------------------------------------
    def losing(self, members: Iterable[Member], why: str) -> None:
        """Reports members that do not answer or can't work with the others, and marks them lost."""
        self._lose(list(members), why, why)

    def lost(self, member: Member, why: str, event_text: str = "") -> None:
        """Marks an incarnation lost: the step goes on without it, and its unit gets a new incarnation.

        The job's events say so once, by the first report. `event_text`: their text, if it is not `why`.
        """
        self._lose([member], why, event_text or why)

    def _lose(self, members: list[Member], why: str, event_text: str) -> None:
        """Marks members lost. Members that are lost at once count as one failed attempt."""
        lost = [member for member in members if self._job.instances.is_present(member)]
        if not lost:
            return
        for member in lost:
            self._job.instances.mark_lost(member)
            self._job.events.fault(f"{member.sid}: {event_text}")
            self._lost_at[member] = time.monotonic()
        broken: StepBroken | None = None
        try:
            names = ", ".join(member.sid for member in lost)
            self._job.retry_limits.attempt_failed(self._step_owner.step, f"lost {names}: {why}")
        except StepBroken as error:
            broken = error
        for member in lost:
            self._job.events.one_more_lost(self.counts)
            self._step_owner.lost(member)
        self._standbys.revise()
        for member in lost:
            self._joining.bring(member.sid, member, partial(self._judge_loss, member, why))
        if broken is not None:
            self._step_owner.break_off(broken)

    def missing(self, sid: str) -> None:
        """Brings back a unit of which no instance answered this orchestrator when it took over the job."""
        left = self._job.mesh.known(sid)
        why = "it did not answer the new orchestrator"
        self._joining.bring(sid, left, None if left is None else lambda: self._judge_loss(left, why))

    async def _judge_loss(self, lost: Member, why: str) -> None:
        """Finds out how a lost member ended, and whether it makes sense to go on.

        Raises:
            Unrecoverable: it does not.
            Parked: the job's own code has failed too often.
        """
        step, attempt = self._step_owner.step, self._step_owner.attempt
        record = await self._job.mesh.last_words(lost, self._job.times.recovery.last_words_s)
        records = [] if record is None else [record]
        try:
            self._job.faults.broke(why, [lost], records, step=step, attempt=attempt)
        except StepBroken as error:
            self._step_owner.break_off(error)
        present = self._step_owner.step
        self._job.quarantine.ended(
            record for record in records if record.culprit is not None and record.culprit.step >= present
        )
        self._job.retry_limits.ended(present, records)
        try:
            if self._job.quarantine.of(step) is None:
                self._budget.ended(records, step=step, now=time.time())
        finally:
            self._job.events.failures(self.counts, now=bool(records and records[0].fault))
        self._give_up_bad()
        await self.choices.replacing(lost, why)

    @property
    def counts(self) -> dict[str, Any]:
        """What broke steps so far, as fields of the job's record: a new orchestrator goes on from there."""
        return {
            "microbatch_faults": self._job.quarantine.snapshot,
            "setbacks": self._job.retry_limits.snapshot,
            "roll_backs": self._job.retry_limits.roll_backs,
            "furthest": self._job.retry_limits.furthest,
            "code_failures": self._budget.snapshot,
        }

    def _give_up_bad(self) -> None:
        """Gives up the open step if it has turned out that it can't be computed."""
        bad = self._job.quarantine.of(self._step_owner.step)
        if bad is not None:
            self._step_owner.give_up(str(bad))

    # --- failures without a lost member ---------------------------------------------------------------
    def restarting(self, step: int, reason: str) -> None:
        """Counts that the open step begins again.

        Raises:
            StepBroken: it has begun again too often.
        """
        log.warning("step begun again", job=self._job.name, step=step, reason=reason)
        self._job.events.fault(f"step {step} is begun again: {reason}")
        self._job.retry_limits.attempt_failed(step, reason)
        self._job.faults.broke(reason, [], [], step=step, attempt=self._step_owner.attempt - 1)

    def silent_gateway(self, sid: str) -> None:
        """Counts that the entry gateway did not begin the step.

        Raises:
            StepBroken: that has happened too often.
        """
        step, attempt = self._step_owner.step, self._step_owner.attempt
        why = f"gateway {sid} did not begin the step"
        self._job.faults.broke(why, [], [], step=step, attempt=attempt, entity=sid)

    # --- the end of failures --------------------------------------------------------------------------
    def taken_over(self, step: int) -> None:
        """The job was taken over at this step: failures of earlier steps are over."""
        self._job.retry_limits.committed(step - 1)
        self._job.quarantine.committed(step - 1)

    def rolling_back(self, broken: StepBroken) -> None:
        """See `RetryLimits.rolling_back`.

        Raises:
            Parked: roll-backs did not help before.
        """
        try:
            self._job.retry_limits.rolling_back(broken.text)
        finally:
            self._job.events.failures(self.counts, now=True)

    def rolled_back(self, text: str) -> None:
        """All members are at one version again."""
        self._job.faults.recovered(text)

    def decided(self, step: int) -> None:
        self._job.retry_limits.committed(step)

    def committed(self, step: int) -> None:
        for member, at in self._lost_at.items():
            text = f"lost {member.sid}: back after {time.monotonic() - at:.2f} s at step {step + 1}"
            self._job.faults.recovered(text)
            self._job.events.recovery(text)
            self.choices.recovered(member, time.monotonic() - at)
        self._lost_at.clear()
        self.choices.committed(step)
        self._job.quarantine.committed(step)
        self._job.faults.committed(step)
        self._give_up_bad()

    def skipped(self, bad: BadMicrobatch) -> None:
        """The step of a quarantined microbatch was left out: its failures are over."""
        self._job.retry_limits.committed(bad.step)
        self._job.quarantine.committed(bad.step)
        self._budget.left_out(bad.step)
        self._job.faults.skipped(bad)
        self._job.faults.committed(bad.step)
        self._job.events.skipped(bad)
