"""What goes wrong in a job's training, and whether it makes sense to go on.

All that breaks a step comes by here: it is judged by `setbacks`, `quarantine` and the limits of the fault
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
        recruits: JoiningMembers,
        standbys: Standbys,
        faults: JobFaults,
        quarantine: Quarantine,
        setbacks: RetryLimits,
        progress: StepOwner,
        telling: EventWriter,
        tasks: GuardedTasks,
    ) -> None:
        self._instances = instances
        self._replacement = replacement
        self._recruits = recruits
        self._standbys = standbys
        self._faults = faults
        self._quarantine = quarantine
        self._progress = progress
        self._telling = telling
        self._tasks = tasks
        self._setbacks = setbacks
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
            self._telling.fault(f"{member.sid}: {told}")
            self._lost_at[member] = time.monotonic()
        broken: StepBroken | None = None
        try:
            names = ", ".join(member.sid for member in lost)
            self._setbacks.attempt_failed(self._progress.step, f"lost {names}: {why}")
        except StepBroken as error:
            broken = error
        for member in lost:
            self._telling.one_more_lost(self.counted)
            self._progress.lost(member)
        self._standbys.revise()
        for member in lost:
            self._recruits.bring(member.sid, member, partial(self._heed, member, why))
        if broken is not None:
            self._progress.break_off(broken)

    def missing(self, sid: str) -> None:
        """Nobody of this unit answered the orchestrator that took the job over."""
        left = self._replacement.known(sid)
        why = "it did not answer the new orchestrator"
        self._recruits.bring(sid, left, None if left is None else lambda: self._heed(left, why))

    async def _heed(self, lost: Member, why: str) -> None:
        """Asks how it ended, and whether it makes sense to go on.

        Raises:
            Unrecoverable: it does not.
        """
        step, attempt = self._progress.step, self._progress.attempt
        record = await self._replacement.last_words(lost)
        words = [] if record is None else [record]
        try:
            self._faults.broke(why, [lost], words, step=step, attempt=attempt)
        except StepBroken as error:
            self._progress.break_off(error)
        present = self._progress.step
        self._quarantine.ended(
            one for one in words if one.culprit is not None and one.culprit.step >= present
        )
        self._setbacks.ended(present, words)
        self._telling.counted(self.counted, now=bool(words and words[0].fault))
        self._give_up_bad()

    @property
    def counted(self) -> dict[str, Any]:
        """What broke steps so far, as in the job's record: a new orchestrator goes on from there."""
        return {
            "microbatch_faults": self._quarantine.held,
            "setbacks": self._setbacks.held,
            "roll_backs": self._setbacks.roll_backs,
            "furthest": self._setbacks.furthest,
        }

    def _give_up_bad(self) -> None:
        """If the open step turns out to be one that can't be computed: out of it, as soon as that is safe."""
        bad = self._quarantine.of(self._progress.step)
        if bad is not None:
            self._progress.give_up(str(bad))

    # --- what is not a member's -----------------------------------------------------------------------
    def restarting(self, step: int, reason: str) -> None:
        """The open step is begun again.

        Raises:
            StepBroken: that was once too often.
        """
        log.warning("step begun again", job=self._progress.job, step=step, reason=reason)
        self._telling.fault(f"step {step} is begun again: {reason}")
        self._setbacks.attempt_failed(step, reason)
        self._faults.broke(reason, [], [], step=step, attempt=self._progress.attempt - 1)

    def silent_gateway(self, sid: str) -> None:
        """The entry gateway did not begin the step.

        Raises:
            StepBroken: that was once too often.
        """
        step, attempt = self._progress.step, self._progress.attempt
        why = f"gateway {sid} did not begin the step"
        self._faults.broke(why, [], [], step=step, attempt=attempt, entity=sid)

    # --- what is over ---------------------------------------------------------------------------------
    def taken_over(self, step: int) -> None:
        """Another orchestrator had brought the job to this step."""
        self._setbacks.committed(step - 1)
        self._quarantine.committed(step - 1)

    def rolling_back(self, broken: StepBroken) -> None:
        """See `RetryLimits.rolling_back`.

        Raises:
            Parked: that did not help before.
        """
        try:
            self._setbacks.rolling_back(broken.text)
        finally:
            self._telling.counted(self.counted, now=True)

    def rolled_back(self, text: str) -> None:
        """All are at one version again."""
        self._faults.recovered(text)

    def decided(self, step: int) -> None:
        self._setbacks.committed(step)

    def committed(self, step: int) -> None:
        for member, at in self._lost_at.items():
            text = f"lost {member.sid}: back after {time.monotonic() - at:.2f} s at step {step + 1}"
            self._faults.recovered(text)
            self._telling.recovery(text)
        self._lost_at.clear()
        self._quarantine.committed(step)
        self._faults.committed(step)
        self._give_up_bad()

    def left_out(self, bad: BadMicrobatch) -> None:
        """The step of a microbatch in quarantine is behind the job, without an update."""
        self._setbacks.committed(bad.step)
        self._quarantine.committed(bad.step)
        self._faults.left_out(bad)
        self._faults.committed(bad.step)
        self._telling.left_out(bad)
