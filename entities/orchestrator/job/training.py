"""The training of one job: steps, boundaries, roll-backs, and steps that are left out.

`recovery.failure_handling` judges what breaks a step; `recovery.joining` and
`membership.membership_changes` say who comes and goes; the step machine decides about the open step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from bus.logs import get_logger
from entities import metrics
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.job_state.retry_limits import Parked, StepBroken, Unrecoverable
from entities.orchestrator.membership.job_changes import JobChanges
from entities.orchestrator.membership.membership_changes import MembershipChanges
from entities.orchestrator.membership.rebalancing import Rebalancing
from entities.orchestrator.membership.recutting import Recutting
from entities.orchestrator.monitoring.alerts import Alerts
from entities.orchestrator.monitoring.job_figures import JobFigures, step_result
from entities.orchestrator.recovery.failure_handling import FailureHandling
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.recovery.left_out_steps import LeftOutSteps
from entities.orchestrator.recovery.node_partitions import NodePartitions
from entities.orchestrator.recovery.peer_copies import PeerCopies
from entities.orchestrator.recovery.replacement import Replacement
from entities.orchestrator.recovery.standbys import Standbys
from entities.orchestrator.step.arrivals import Arrivals
from entities.orchestrator.step.member_orders import MemberOrders
from entities.orchestrator.step.step_loop import StageGone, StepGivenUp
from entities.orchestrator.step.step_owner import StepOwner
from entities.orchestrator.transaction.step_events import RecomputationNoted, in_order
from entities.orchestrator.transaction.step_ledger import StepLedger
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.alert import Alert
from schemas.errors import Conflict, DmscError
from schemas.evaluation_sets import evaluation_sets
from schemas.fault import ClusterReport
from schemas.job import JobState, StepResult
from schemas.recipe_progress import observed
from schemas.signals import QosReport
from schemas.step import Member, StepDecision
from schemas.training_length import length_text

log = get_logger("orchestrator")

RESTORATIONS = 8
"""Failed restorations in a row before the job is parked; each was broken by a new loss."""


class Training:
    """Runs the steps of one job; an async context from the deployment to the export of the weights."""

    def __init__(self, job: JobContext, checkpoints: Checkpoints) -> None:
        self._job = job
        self._times = job.times.run
        self._checkpoints = checkpoints
        self._orders = MemberOrders(job)
        self._step_owner = step_owner = StepOwner(job, self, self._pauses)
        replacement = Replacement(job)
        self._joining = joining = JoiningMembers(job, step_owner, replacement)
        self.standbys = Standbys(job, step_owner)
        self.failures = FailureHandling(job, step_owner, joining, self.standbys)
        self.changes = MembershipChanges(job, step_owner, joining, self.standbys, checkpoints)
        self.job_changes = JobChanges(job)
        self.rebalancing = Rebalancing(job, step_owner, joining, self.job_changes, self.changes.part_with)
        self._partitions = NodePartitions(job, step_owner, replacement, self.failures)
        self._copies = PeerCopies(job, step_owner, joining)
        self._left_out = LeftOutSteps(job, step_owner, self.failures, self._reopen)
        self.recutting = Recutting(
            job,
            step_owner,
            joining,
            self._reopen,
            self.failures.losing,
            lambda: self._arrivals.wake(),
            self._cut_anew,
            lambda: self.changes.departing,
        )
        self._arrivals = Arrivals(job)
        self._validated_at = -1
        self._decided_at = time.monotonic()
        self.alerts = Alerts(job.store.record.alerts)
        self._figures = JobFigures()
        self._park_reason = ""
        self._parks_for_room = False

    async def __aenter__(self) -> Training:
        self._job.tasks.spawn(self._job.events.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            if self._step_owner.running:
                await self._step_owner.close()
        finally:
            await self._arrivals.close()
            await self._job.tasks.close()
            store, recuts = self._job.store, self.recutting.ended("training ended before it was in force")
            store.record = store.record.model_copy(update={"recuts": recuts})  # written with its last state

    # --- for the job's run ------------------------------------------------------------
    @property
    def step(self) -> int:
        """The step that is open."""
        return self._step_owner.step

    @property
    def attempt(self) -> int:
        """The present attempt of the open step."""
        return self._step_owner.attempt

    def stages(self) -> tuple[tuple[Member, ...], ...]:
        """Members with the state of the present version, by stage."""
        return self._step_owner.stages

    def scale(self, stages: Sequence[int], replicas: int) -> str:
        """See `MembershipChanges.scale`."""
        if why := self.recutting.under_way:
            raise Conflict(f"{why}: ask again when it is in force")
        if self.rebalancing.under_way:
            raise Conflict(f"{self.rebalancing.under_way} is changing its stage: ask again in a moment")
        self.job_changes.disturbed()
        said = self.changes.scale(stages, replicas)
        self._arrivals.wake()
        return said

    def drain(self, sid: str, left_s: float | None = None) -> str:
        """See `JobRun.drain`."""
        if left_s is None:
            said = self.recutting.under_way or self.changes.drain(sid)
        else:
            if self.recutting.under_way:
                self.recutting.disturbed(f"the machine of {sid} goes away")
            said = self.changes.noticed.ask(sid, left_s)
        self._arrivals.wake()
        return said

    def park(self, why: str, *, for_room: bool = False) -> bool:
        """Has the job stop at a checkpoint after the open step; '' withdraws that. Returns: it runs.

        `for_room`: it then goes on as soon as there is room.
        """
        self._park_reason, self._parks_for_room = why, for_room
        self._arrivals.wake()
        return self._step_owner.running

    @property
    def finds_room(self) -> bool:
        """Whether there is room now for an instance that waits for a slot: it is placed in a moment."""
        return self._joining.replacement.finds_room()

    async def events_written(self) -> None:
        await self._job.tasks.unless_failed(self._job.events.written())

    # --- beginning ------------------------------------------------------------------------------------
    async def begin(self) -> None:
        """Starts training with fresh instances, at the job's beginning or at its newest checkpoint.

        Raises:
            Fenced: another orchestrator leads this job.
        """
        await self._job.decisions.take()
        self.job_changes.deployed()
        self.recutting.taken_over()
        self._step_owner.step, members = await self._restore(fresh=True)
        if self.step:
            await self._job.store.tell("recovery", text=f"resumed from the checkpoint of step {self.step}")
        resume_point = self._step_owner.afresh(members)
        await self._open(resume_point)
        self._joining.introduce(resume_point)

    async def go_on(self, resume_point: ResumePoint) -> None:
        """Goes on with training by the living instances of an earlier orchestrator."""
        self._step_owner.step = resume_point.step
        self.failures.taken_over(resume_point.step)
        self.recutting.taken_over()
        await self._job.store.note(replaced=self._job.decisions.replaced)
        self.job_changes.disturbed()
        await self._open(resume_point)
        instances = self._job.instances
        aside = [member for member in instances.present() if instances.is_before_entry(member)]
        everyone = (*resume_point.everyone, *aside)
        present = {member.sid for member in everyone if member not in instances.lost}
        for unit in self._job.instances.units:
            if unit.sid not in present:
                self.failures.missing(unit.sid)

    # --- steps and boundaries ----------------------------------------------------------------------------
    async def run(self) -> None:
        """Trains to the last step, validation and checkpoints included.

        Raises:
            DmscError: the job can't go on; the text says why.
        """
        self._decided_at = time.monotonic()
        while True:
            try:
                while await self._boundary():
                    boundary = self._step_owner.loop.to_boundary(self.step)
                    self._step_owner.step = await self._job.tasks.unless_failed(boundary)
                return
            except StepGivenUp as given_up:
                log.warning("step given up", job=self._job.name, step=self.step, reason=given_up.text)
            except (StageGone, StepBroken) as cause:
                await self._roll_back(cause)

    async def _boundary(self) -> bool:
        """Does the work that is due before the next step, and leaves out steps that can't be computed.

        Returns:
            Whether there is a next step.
        """
        while True:
            if not self._step_owner.loop.over:  # else the open step was given up
                await self._at_rest()
            bad = self._job.quarantine.of(self.step)
            if self._step_owner.at_end:
                return False
            if bad is not None:
                await self._left_out.leave_out(bad)
            elif self._step_owner.loop.over:
                await self._left_out.put_back()
            elif await self._arrived():
                return True

    async def _arrived(self) -> bool:
        """Whether the records of the next step are there; else waits for news, or ends with the feed.

        Raises:
            BadData: the feed was deleted, or is damaged.
        """
        there = await self._arrivals.standing(self.step)
        if there == "over":
            text = f"feed {self._arrivals.feed} ends before step {self.step}"
            progress = self._job.store.record.progress
            progress = progress.model_copy(update={"stopped_at": self.step, "because": text})
            await self._job.store.note(now=True, progress=progress)
            await self._job.decisions.stop(self.step)
            await self._job.store.tell("state", state=self._job.store.record.state, text=f"stops: {text}")
        elif there == "waits":
            wait = self._arrivals.until_news(self.step, self._checkpoints.rest_s(self.step))
            if not await self._job.tasks.unless_failed(self._step_owner.loop.beside(wait)):
                self._checkpoints.rests(self.step)
            self._decided_at = time.monotonic()  # a wait is no part of a step's time
        return there == "there"

    async def _at_rest(self) -> None:
        """Validates, takes a checkpoint, and lets one instance leave its node, as far as each is due."""
        if self._validation_due(self.step) and self._validated_at != self.step:
            await self._job.tasks.unless_failed(self._validate())
            self._validated_at = self.step
        try:
            await self._job.tasks.unless_failed(
                self._checkpoints.at_boundary(self.step, self._step_owner.stages)
            )
            if not self._step_owner.at_end:
                await self._park()
                await self.changes.at_rest()
                await self.recutting.at_rest()
        except MemberLost as lost:
            self.failures.losing(lost.members, str(lost))  # the checkpoint is due again at the next boundary

    async def _park(self) -> None:
        """Ends the training at a checkpoint of this step, if the job is to be parked.

        Raises:
            Parked: the job is to be parked.
            MemberLost: a member died before the checkpoint was taken.
        """
        if self._park_reason:
            step, stages = self._step_owner.step, self._step_owner.stages
            await self._job.tasks.unless_failed(
                self._checkpoints.of_this_step(step, stages, self._park_reason)
            )
        if self._park_reason:  # still
            raise Parked(self._park_reason, for_room=self._parks_for_room)

    def _pauses(self, step: int) -> bool:
        return (
            step >= self._job.store.record.last_step
            or self._validation_due(step)
            or self._checkpoints.due(step)
            or self._job.quarantine.of(step) is not None
            or self.changes.need_rest
            or self.recutting.needs_rest
            or bool(self._park_reason)
            or not self._arrivals.there(step)
        )

    def _validation_due(self, step: int) -> bool:
        training = self._job.spec.training
        if not any(count for _, count in evaluation_sets(self._job.spec)):
            return False
        if step == self._job.store.record.last_step:
            return True
        every = training.evaluate_every
        return bool(every) and step % every == 0

    async def _validate(self) -> None:
        """Validates, and decides by the result: when training ends, and whether the rate falls."""
        found = await self._step_owner.loop.validate(self.step)
        self._job.events.validation(self.step, found.loss, found.values, found.problems)
        await self.events_written()
        store, training = self._job.store, self._job.spec.training
        progress = observed(store.record.progress, training, self.step, found.values)
        if not training.watched or progress == store.record.progress:
            return
        stops = progress.stopped_at is not None and store.record.progress.stopped_at is None
        await store.note(now=True, progress=progress)  # before a step is decided that depends on it
        if stops:
            await self._job.decisions.stop(self.step)
            await store.tell("state", state=store.record.state, text=f"stops early: {progress.because}")

    # --- going back -------------------------------------------------------------------------------------
    async def _roll_back(self, cause: StageGone | StepBroken) -> None:
        """Has everyone take the last checkpoint, or the seed, and opens a new loop there.

        `cause`: a stage was lost with its state, or a step failed too often.

        Raises:
            Parked: the job can't be brought back now.
        """
        began = time.monotonic()
        if isinstance(cause, StepBroken):
            self.failures.rolling_back(cause)
        await self._job.store.move(JobState.RECOVERING, cause.text)
        closed = await self._step_owner.close()
        version, members = await self._restore(attempt=closed.attempt)
        self._step_owner.step, self._validated_at = version, -1
        text = f"{cause.text}: back after {time.monotonic() - began:.2f} s, all back to step {version}"
        self.failures.rolled_back(text)
        self.job_changes.rolled_back(cause.stage if isinstance(cause, StageGone) else None)
        self.recutting.disturbed(cause.text)
        await self._job.store.tell("recovery", text=text)
        await self._job.store.move(
            JobState.RUNNING, f"step {version} of {length_text(self._job.store.record.last_step)}"
        )
        resume_point = self._step_owner.afresh(members, closed.attempt, closed.generation)
        await self._open(resume_point)
        self._joining.introduce(resume_point)
        self._job.queue.again()  # it can be told something again
        self._decided_at = time.monotonic()

    async def _restore(
        self, *, fresh: bool = False, attempt: int | None = None
    ) -> tuple[int, frozenset[Member]]:
        """Has everyone take the newest whole checkpoint, or the job's beginning.

        Returns:
            The version, and the members that are at it; others join later.

        Raises:
            Parked: an instance that the job needs finds no room, or members are lost again and again.
        """
        failures, pause_s = 0, self._times.restore_pause_s
        while True:
            await self._joining.until_there()
            coming = self._joining.coming
            members = frozenset(
                member
                for member in self._job.instances.present()
                if member.sid not in coming and not self._job.instances.is_before_entry(member)
            )
            try:
                if attempt is not None:
                    fenced = in_order(self._job.instances.lost)
                    abort = self._orders.abort_all(members, step=self.step, attempt=attempt, fenced=fenced)
                    await self._job.tasks.unless_failed(abort)
                restoring = self._checkpoints.restore(fresh=fresh, crew=members)
                return await self._job.tasks.unless_failed(restoring), members
            except MemberLost as lost:
                failures += 1
                last: DmscError = lost
                self.failures.losing(lost.members, str(lost))
            except (Unrecoverable, Parked):
                raise
            except DmscError as error:  # the store, or a member, does not answer
                failures += not error.retryable
                last = error
                await self._job.store.reason(f"the checkpoint can't be read yet: {error.text}")
                await self._job.tasks.unless_failed(asyncio.sleep(pause_s))
                pause_s = min(2 * pause_s, self._times.restore_pause_most_s)
            fresh = False
            if failures >= RESTORATIONS:
                why = f"{failures} restorations in a row failed; the last: {last}"
                raise Parked(why, for_room=False)

    async def until_whole(self) -> None:
        """Returns once every stage has a member again, from a peer's copy or by a roll-back.

        After a roll-back, `step` is lower than the number of steps, and training has to go on.
        """
        while not all(self._step_owner.stages):
            try:
                await self._job.tasks.unless_failed(self._step_owner.loop.pause())
            except (StageGone, StepBroken) as cause:
                await self._roll_back(cause)

    async def _reopen(self, resume_point: ResumePoint) -> None:
        """Opens a loop where one was closed, with those that go on.

        Raises:
            StageGone: no member of a stage has the state.
        """
        await self._open(resume_point)
        self.standbys.revise()
        self._joining.introduce(resume_point)
        for stage, members in enumerate(resume_point.stages):
            if not members:
                raise StageGone(stage)

    def _cut_anew(self) -> None:
        """Stages have other layers: their copies and what moves were to bring say nothing any more."""
        self._copies.forget()
        self.job_changes.disturbed()

    async def _open(self, resume_point: ResumePoint) -> None:
        await self._step_owner.open(resume_point)
        self._keep_copies()

    def _keep_copies(self) -> None:
        if self._job.spec.parallel.copies:
            self._copies.revise()

    # --- reports of the step loop (`StepObserver`) --------------------------------------------------
    def decided(self, ledger: StepLedger, decision: StepDecision) -> None:
        now = time.monotonic()
        result = step_result(
            self._job.spec, ledger, decision, now - self._decided_at, self._step_owner.loop.clock.phases()
        )
        self._decided_at = now
        self._step_owner.step = decision.step + 1
        self.failures.decided(decision.step)
        self._checkpoints.committed(result)
        replaced = {"replaced": self._job.decisions.replaced}
        self._job.events.step(result, self.failures.counts | replaced)
        self._observe(result, ledger)
        self.job_changes.decided(result, last=self._step_owner.at_end)
        self.changes.decided()
        self.rebalancing.decided()
        self.recutting.decided([*ledger.claims.values()], result.step_s)
        self.standbys.revise()

    def _observe(self, result: StepResult, ledger: StepLedger) -> None:
        self._figures.decided(result)
        for alert in self.alerts.decided(result, ledger.claims.values(), self._job.instances.graph):
            self._alert(alert)

    def _alert(self, alert: Alert) -> None:
        tell = log.warning if alert.raised else log.info
        tell("alert", job=self._job.name, **alert.model_dump(include={"kind", "step", "raised", "text"}))
        self._job.events.alert(alert, self.alerts.raised)

    def reported(self, report: QosReport | ClusterReport) -> None:
        """A report of a cluster's quality (Type 5), or an agent's judgement of an instance, arrived."""
        if isinstance(report, QosReport) and report.energy_j is not None:
            self._job.events.energy(report.sid, report.energy_j)
        for alert in self.alerts.reported(report, self.step):
            self._alert(alert)

    def readings(self, peak_tflops: float | None) -> Iterator[metrics.MetricReading]:
        """Metrics of this job. `peak_tflops`: peak of one device, 10¹² FLOP/s; None: unknown."""
        yield from self._figures.readings(self._job.store.record, peak_tflops)
        for raised in self.alerts.raised:
            yield metrics.JOB_ALERT(1, job=self._job.name, kind=raised.kind)
        for kind, count in self.alerts.counted.items():
            yield metrics.JOB_ALERTS(count, job=self._job.name, kind=kind)

    def committed(self, step: int) -> None:
        self.failures.committed(step)
        self._keep_copies()

    def losing(self, members: Iterable[Member], why: str) -> None:
        """Reports members that do not answer, and marks them lost."""
        self.failures.losing(members, why)

    def silence(self, witness: Member, peer: Member) -> None:
        """See `NodePartitions.silence`."""
        self._partitions.silence(witness, peer)

    def replayed(self, replay: RecomputationNoted) -> None:
        log.info(
            "microbatches computed again", job=self._job.name, step=self.step, replayed=len(replay.replayed)
        )
        self._job.events.recovery(f"{len(replay.replayed)} microbatches of the lost are computed again")

    def restarting(self, step: int, reason: str) -> None:
        self.failures.restarting(step, reason)

    async def bring_back(self, stage: int, version: int) -> Member | None:
        return await self._copies.bring_back(stage, version)

    async def other_gateway(self, failed: str) -> None:
        self.failures.silent_gateway(failed)
        await self._job.gateway.leave(failed)
