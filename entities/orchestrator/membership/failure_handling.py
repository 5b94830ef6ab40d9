"""What goes wrong in a job's training, and whether it makes sense to go on.

All that breaks a step comes by here: it is judged by `retry_limits`, `quarantine` and the limits of the fault
queue, told, and ended there once the step is committed. A lost member's unit gets a new incarnation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from bus.logs import get_logger
from entities.orchestrator.faults.job_faults import JobFaults
from entities.orchestrator.job_state.event_writer import EventWriter
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.quarantine import BadMicrobatch, Quarantine
from entities.orchestrator.job_state.retry_limits import RetryLimits, StepBroken
from entities.orchestrator.membership.joining import JoiningMembers
from entities.orchestrator.membership.replacement import Replacement
from entities.orchestrator.membership.standbys import Standbys
from entities.orchestrator.step.step_owner import StepOwner
from schemas.step import Member

log = get_logger("orchestrator")


class FailureHandling:
    """One job's. A failure that ends the job is the failure of `tasks`, or raised to the step loop."""

    def __init__(
        self,
        instances: JobInstances,
        replacement: Replacement,
        joining: JoiningMembers,
        standbys: Standbys,
        faults: JobFaults,
        quarantine: Quarantine,
        retry_limits: RetryLimits,
        step_owner: StepOwner,
        events: EventWriter,
        tasks: GuardedTasks,
    ) -> None:
        self._instances = instances
        self._replacement = replacement
        self._joining = joining
        self._standbys = standbys
        self._faults = faults
        self._quarantine = quarantine
        self._step_owner = step_owner
        self._events = events
        self._tasks = tasks
        self._retry_limits = retry_limits
        self._lost_at: dict[Member, float] = {}

    # --- members --------------------------------------------------------------------------------------
    def losing(self, members: Iterable[Member], why: str) -> None:
        """These do not answer, or can't work with the others: that is told, and they are lost."""
        self._lose(list(members), why, why)

    def lost(self, member: Member, why: str, told: str = "") -> None:
        """This incarnation is lost to the job: the step goes on without it, its unit gets a new one.

        The job's events say so once, whoever comes first with it. `told`: their words, if not `why`.
        """
        self._lose([member], why, told or why)

    def _lose(self, members: list[Member], why: str, told: str) -> None:
        """Those that are lost at once are one setback, however many they are."""
        lost = [one for one in members if self._instances.is_present(one)]
        if not lost:
            return
        for member in lost:
            self._instances.mark_lost(member)
            self._events.fault(f"{member.sid}: {told}")
            self._lost_at[member] = time.monotonic()
        broken: StepBroken | None = None
        try:
            names = ", ".join(member.sid for member in lost)
            self._retry_limits.attempt_failed(self._step_owner.step, f"lost {names}: {why}")
        except StepBroken as error:
            broken = error
        for member in lost:
            self._events.one_more_lost(self.counted)
            self._step_owner.lost(member)
        self._standbys.revise()
        for member in lost:
            self._joining.bring(member.sid, member, partial(self._judge_loss, member, why))
        if broken is not None:
            self._step_owner.break_off(broken)

    def missing(self, sid: str) -> None:
        """Nobody of this unit answered the orchestrator that took the job over."""
        left = self._replacement.known(sid)
        why = "it did not answer the new orchestrator"
        self._joining.bring(sid, left, None if left is None else lambda: self._judge_loss(left, why))

    async def _judge_loss(self, lost: Member, why: str) -> None:
        """Asks how it ended, and whether it makes sense to go on.

        Raises:
            Unrecoverable: it does not.
        """
        step, attempt = self._step_owner.step, self._step_owner.attempt
        record = await self._replacement.last_words(lost)
        records = [] if record is None else [record]
        try:
            self._faults.broke(why, [lost], records, step=step, attempt=attempt)
        except StepBroken as error:
            self._step_owner.break_off(error)
        present = self._step_owner.step
        self._quarantine.ended(
            one for one in records if one.culprit is not None and one.culprit.step >= present
        )
        self._retry_limits.ended(present, records)
        self._events.counted(self.counted, now=bool(records and records[0].fault))
        self._give_up_bad()

    @property
    def counted(self) -> dict[str, Any]:
        """What broke steps so far, as in the job's record: a new orchestrator goes on from there."""
        return {
            "microbatch_faults": self._quarantine.held,
            "setbacks": self._retry_limits.held,
            "roll_backs": self._retry_limits.roll_backs,
            "furthest": self._retry_limits.furthest,
        }

    def _give_up_bad(self) -> None:
        """If the open step turns out to be one that can't be computed: out of it, as soon as that is safe."""
        bad = self._quarantine.of(self._step_owner.step)
        if bad is not None:
            self._step_owner.give_up(str(bad))

    # --- what is not a member's -----------------------------------------------------------------------
    def restarting(self, step: int, reason: str) -> None:
        """The open step is begun again.

        Raises:
            StepBroken: that was once too often.
        """
        log.warning("step begun again", job=self._step_owner.job, step=step, reason=reason)
        self._events.fault(f"step {step} is begun again: {reason}")
        self._retry_limits.attempt_failed(step, reason)
        self._faults.broke(reason, [], [], step=step, attempt=self._step_owner.attempt - 1)

    def silent_gateway(self, sid: str) -> None:
        """The entry gateway did not begin the step.

        Raises:
            StepBroken: that was once too often.
        """
        step, attempt = self._step_owner.step, self._step_owner.attempt
        why = f"gateway {sid} did not begin the step"
        self._faults.broke(why, [], [], step=step, attempt=attempt, entity=sid)

    # --- what is over ---------------------------------------------------------------------------------
    def taken_over(self, step: int) -> None:
        """Another orchestrator had brought the job to this step."""
        self._retry_limits.committed(step - 1)
        self._quarantine.committed(step - 1)

    def rolling_back(self, broken: StepBroken) -> None:
        """See `RetryLimits.rolling_back`.

        Raises:
            Parked: that did not help before.
        """
        try:
            self._retry_limits.rolling_back(broken.text)
        finally:
            self._events.counted(self.counted, now=True)

    def rolled_back(self, text: str) -> None:
        """All are at one version again."""
        self._faults.recovered(text)

    def decided(self, step: int) -> None:
        self._retry_limits.committed(step)

    def committed(self, step: int) -> None:
        for member, at in self._lost_at.items():
            text = f"lost {member.sid}: back after {time.monotonic() - at:.2f} s at step {step + 1}"
            self._faults.recovered(text)
            self._events.recovery(text)
        self._lost_at.clear()
        self._quarantine.committed(step)
        self._faults.committed(step)
        self._give_up_bad()

    def left_out(self, bad: BadMicrobatch) -> None:
        """The step of a microbatch in quarantine is behind the job, without an update."""
        self._retry_limits.committed(bad.step)
        self._quarantine.committed(bad.step)
        self._faults.left_out(bad)
        self._faults.committed(bad.step)
        self._events.left_out(bad)
