"""A job's training, from the first step to the last: steps, boundaries, losses, newcomers, roll-backs.

What is decided about a loss is decided elsewhere: by the step machine for the open step, by `setbacks`,
`quarantine` and `job_faults` for the job as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import STEP_ABORT
from entities.orchestrator import step_events as ev
from entities.orchestrator.checkpoints import Checkpoints
from entities.orchestrator.communication import Communication
from entities.orchestrator.decision_record import DecisionRecord
from entities.orchestrator.hand_over import HandOver
from entities.orchestrator.instances import Instances, MemberLost
from entities.orchestrator.job_faults import JobFaults
from entities.orchestrator.journal import Journal
from entities.orchestrator.mesh_view import MeshView
from entities.orchestrator.omission import Omission
from entities.orchestrator.peer_copies import PeerCopies
from entities.orchestrator.quarantine import BadMicrobatch, Quarantine, skip_decision
from entities.orchestrator.replacement import OccupiedFn, Replacement
from entities.orchestrator.scaling import (
    added_replicas,
    removed_replicas,
    standby_weights,
    with_units,
    without_units,
)
from entities.orchestrator.setbacks import Setbacks, Unrecoverable
from entities.orchestrator.step_ledger import StepLedger
from entities.orchestrator.step_loop import StageGone, StepGivenUp, StepLoop
from entities.orchestrator.step_machine import StepMachine
from entities.orchestrator.takeover import Settled
from schemas.errors import Conflict, DmscError
from schemas.job import JobState, StepResult
from schemas.learning_rate import learning_rate
from schemas.step import Member, MicrobatchClaim, StepAbort, StepDecision
from schemas.task_graph import UnitKind

log = get_logger("orchestrator")

ABORT_DEADLINE_S = 20.0
ROLL_BACKS = 8
"""Restorations in a row, each broken by a new loss, before the job fails."""
RETRY_S = 0.5


class Training:
    """Runs the steps of one job. `async with` it from the deployment to the export of the weights."""

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        journal: Journal,
        instances: Instances,
        checkpoints: Checkpoints,
        communication: Communication,
        faults: JobFaults,
        occupied: OccupiedFn,
        gateway: Callable[[], str],
        other_gateway: Callable[[str], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._journal = journal
        self._instances = instances
        self._checkpoints = checkpoints
        self._communication = communication
        self._gateway = gateway
        self._choose_other = other_gateway
        self._spec = journal.record.spec
        self._job = journal.job
        self._epoch = journal.record.epoch
        self._record = DecisionRecord(bus, self._job, self._epoch)
        self._replacement = Replacement(bus, mesh, instances, journal, occupied)
        self._hand_over = HandOver(instances, self._replacement)
        self._faults = faults
        self._setbacks = Setbacks(journal.record.setbacks)
        self._quarantine = Quarantine(self._spec.training.on_bad_microbatch, journal.record.microbatch_faults)
        self._copies = PeerCopies(bus, instances, self._job, self._epoch)
        self._loop: StepLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._telling: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decided_at = time.monotonic()
        self._lost_at: dict[Member, float] = {}
        self._last_attempt = 0
        self._leaving: set[str] = set()  # units that the job shall do without
        self.step = 0

    async def __aenter__(self) -> Training:
        self._spawn(self._tell_in_order())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            await self._close_loop()
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if not self._trouble.done():
            self._trouble.cancel()

    # --- what its owner calls -------------------------------------------------------------------------
    async def begin(self) -> None:
        """Takes up the job with fresh instances, at its beginning or at the newest checkpoint.

        Raises:
            Fenced: another orchestrator leads this job.
        """
        await self._record.take()
        self.step = await self._restore(fresh=True)
        if self.step:
            await self._journal.tell("recovery", text=f"resumed from the checkpoint of step {self.step}")
        await self._open_loop(self._fresh(self.step, 0, 0))

    async def _restore(self, *, fresh: bool = False, attempt: int | None = None) -> int:
        """Everyone takes the newest checkpoint that is whole, or the job's beginning; returns its version."""
        last: DmscError | None = None
        for _ in range(ROLL_BACKS):
            await self._until_brought()
            try:
                if attempt is not None:
                    await self._abort(attempt)
                version: int = await self._unless_trouble(self._checkpoints.restore(fresh=fresh))
                return version
            except MemberLost as lost:
                last = lost
                self.losing(lost.members, str(lost))
            except Unrecoverable:
                raise
            except DmscError as error:  # the store, or somebody, does not answer
                last = error
                await asyncio.sleep(RETRY_S)
            fresh = False
        raise Unrecoverable(f"{ROLL_BACKS} restorations in a row failed; the last: {last}")

    async def go_on(self, settled: Settled) -> None:
        """Takes up the job with the living instances of an orchestrator before this one."""
        self.step = settled.step
        self._quarantine.committed(settled.step - 1)
        self._setbacks.committed(settled.step - 1)
        await self._open_loop(settled)
        present = {member.sid for member in settled.everyone if member not in self._instances.lost}
        for unit in self._instances.units:
            if unit.sid not in present:
                left = self._replacement.known(unit.sid)
                self._replace(unit.sid, left, "it did not answer the new orchestrator" if left else "")

    @property
    def record(self) -> DecisionRecord:
        return self._record

    async def run(self) -> None:
        """Trains to the last step, validation and checkpoints included.

        Raises:
            DmscError: the job can't go on; the text says why.
        """
        self._decided_at = time.monotonic()
        while True:
            try:
                while await self._boundary():
                    assert self._loop is not None
                    self.step = await self._unless_trouble(self._loop.to_boundary(self.step))
                return
            except StepGivenUp as given_up:
                log.warning("step given up", job=self._job, step=self.step, reason=given_up.text)
            except StageGone as gone:
                await self._roll_back(gone)

    async def _boundary(self) -> bool:
        """What is due before the next step; whether there is one. One that can't be computed is left out."""
        while True:
            assert self._loop is not None
            if not self._loop.over:  # a step that was given up had its boundary before
                await self._at_rest()
            bad = self._quarantine.of(self.step)
            if bad is None or self.step >= self._spec.training.steps:
                return self.step < self._spec.training.steps
            await self._leave_out(bad)

    async def _at_rest(self) -> None:
        """Validation, checkpoint, and one instance that is to leave its node."""
        if self._validation_due(self.step):
            await self._unless_trouble(self._validate())
        try:
            await self._unless_trouble(self._checkpoints.at_boundary(self.step, self.stages()))
            if self.step < self._spec.training.steps:
                await self._move_at_rest()
        except MemberLost as lost:
            self.losing(lost.members, str(lost))  # due again at the next boundary

    @property
    def attempt(self) -> int:
        """The present attempt of the open step."""
        return self._loop.machine.attempt if self._loop is not None else self._last_attempt

    def drain(self, sid: str) -> str:
        """Has an instance leave its node once the open step is decided; what stands in the way, or ''.

        Asked again until it is gone.
        """
        if self._loop is None:
            return "the job is being brought back"
        return self._hand_over.ask(sid, self.stages(), self._bringing)

    def claimed(self, claim: MicrobatchClaim) -> None:
        if self._loop is not None:
            self._loop.claimed(claim)

    def lost(self, member: Member, why: str, told: str = "") -> None:
        """This incarnation is lost to the job: the step goes on without it, its unit gets a new one.

        The job's events say so once, whoever comes first with it. `told`: their words, if not `why`.
        """
        if member in self._instances.lost or self._instances.members.get(member.sid) != member:
            return
        self._instances.mark_lost(member)
        self._say(lambda: self._journal.tell("fault", text=f"{member.sid}: {told or why}"))
        self._lost_at[member] = time.monotonic()
        try:
            self._setbacks.attempt_failed(self.step, f"lost {member.sid}: {why}")
        except Unrecoverable as error:
            self._fail(error)
            return
        counted = self._counted()
        self._say(
            lambda: self._journal.note(now=True, recoveries=self._journal.record.recoveries + 1, **counted)
        )
        if self._loop is not None:
            self._loop.lost(member)
        self._wake_standbys()
        self._replace(member.sid, member, why)

    def scale(self, stage: int, replicas: int) -> str:
        """Gives a stage more or fewer working replicas; returns what will happen, in words.

        More are placed and join when they hold the state; those that leave do so when the open step is
        decided, so that nothing is computed twice.

        Raises:
            BadInput: no such stage, or fewer than one replica.
            Conflict: there is no room.
        """
        graph = self._instances.graph
        assert graph is not None
        added = added_replicas(graph, stage, replicas)
        removed = removed_replicas(graph, stage, replicas)
        if added:
            why = self._replacement.no_room(list(added))
            if why:
                raise Conflict(f"stage {stage} can't have {replicas} replicas now: {why}")
            self._instances.graph = with_units(graph, added)
            for unit in added:
                self._replace(unit.sid)
            return f"{', '.join(unit.sid for unit in added)} will join"
        for unit in removed:
            self._leaving.add(unit.sid)
        return f"{', '.join(unit.sid for unit in removed)} will leave" if removed else "nothing to do"

    def _let_go(self) -> None:
        """A step is decided: whoever is to leave may, for nothing of the next one is theirs yet."""
        leaving, self._leaving = self._leaving, set()
        for sid in sorted(leaving):
            member = self._instances.members.get(sid)
            if member is None or self._loop is None:
                continue
            self._part_with(member)
            self._spawn(self._forget(member))
        if self.step < self._spec.training.steps:
            member = self._hand_over.next(self.stages(), self._bringing, at_rest=False)
            if member is not None:
                self._move(member)

    def _part_with(self, member: Member) -> None:
        self._instances.mark_lost(member)
        if self._loop is not None:
            self._loop.lost(member)
        self._wake_standbys()

    def _move(self, member: Member) -> None:
        """It leaves its node, and a new incarnation takes its place: nothing is wrong with it."""
        log.info("hand-over", job=self._job, sid=member.sid, step=self.step)
        self._part_with(member)
        self._replace(member.sid, member)
        text = f"{member.sid} leaves its node: another takes its place"
        self._say(lambda: self._journal.tell("recovery", text=text))

    async def _forget(self, member: Member) -> None:
        await self._replacement.end(member)
        assert self._instances.graph is not None
        self._instances.graph = without_units(self._instances.graph, {member.sid})
        if self._instances.members.get(member.sid) == member:
            del self._instances.members[member.sid]
        self._tell_instances(f"{member.sid} has left")

    def _tell_instances(self, text: str) -> None:
        self._say(lambda: self._journal.note(now=True, graph=self._instances.graph))
        self._say(lambda: self._journal.tell("instances", text=text, instances=self._instances.views()))

    def _wake_standbys(self) -> None:
        """Gives a stage's standbys work while they are all that it has, and takes it away again."""
        graph = self._instances.graph
        if graph is None or self._loop is None:
            return
        living = {one.sid for members in self.stages() for one in members}
        for stage, weights in standby_weights(graph, self._communication.weights(), living).items():
            awake = [unit.sid for unit in graph.stage(stage) if unit.standby and weights[unit.sid]]
            reason = f"standbys of stage {stage} {'work' if awake else 'rest'}"
            self._communication.revise(reason, weights=(stage, weights))

    def _replace(self, sid: str, lost: Member | None = None, why: str = "") -> None:
        """Brings a new incarnation; one that is being brought already looks after its own failures."""
        present = self._bringing.get(sid)
        if present is not None and not present.done():
            return
        task = self._spawn(self._bring(sid, lost, why))
        self._bringing[sid] = task
        task.add_done_callback(lambda done: self._brought(sid, done))

    def stages(self) -> tuple[tuple[Member, ...], ...]:
        """Members with the state of the present version, by stage."""
        assert self._loop is not None
        lost = self._instances.lost
        return tuple(
            tuple(one for one in members if one not in lost) for members in self._loop.machine.stages
        )

    async def until_whole(self) -> None:
        """Returns once every stage has a member again, from a peer's copy or by a roll-back.

        After a roll-back, `step` is behind the last one.
        """
        while not all(self.stages()):
            try:
                assert self._loop is not None
                await self._unless_trouble(self._loop.pause())
            except StageGone as gone:
                await self._roll_back(gone)

    # --- losses and newcomers -------------------------------------------------------------------------
    async def _bring(self, sid: str, lost: Member | None, why: str) -> None:
        """A new incarnation for a lost one; without a `why`, for one that left in order."""
        if lost is not None and why:
            await self._heed(lost, why, self.step, self.attempt)
        newcomer = await self._replacement.bring(sid, lost)
        self._tell_instances(f"{newcomer.sid} is ready")
        if self._loop is not None:
            assert self._instances.graph is not None
            self._loop.post(ev.Arrived(newcomer, self._instances.graph.unit(newcomer.sid).stage))

    async def _heed(self, lost: Member, why: str, step: int, attempt: int) -> None:
        """Asks how it ended, and whether it makes sense to go on.

        Raises:
            Unrecoverable: it does not.
        """
        record = await self._replacement.last_words(lost)
        words = [] if record is None else [record]
        self._faults.broke(why, [lost], words, step=step, attempt=attempt)
        self._quarantine.ended(
            one for one in words if one.culprit is not None and one.culprit.step >= self.step
        )
        self._setbacks.ended(self.step, words)
        await self._journal.note(now=bool(words and words[0].fault), **self._counted())
        self._give_up_bad()

    def _counted(self) -> dict[str, Any]:
        """What broke steps so far: a new orchestrator goes on from there."""
        return {"microbatch_faults": self._quarantine.held, "setbacks": self._setbacks.held}

    def _give_up_bad(self) -> None:
        """If the open step turns out to be one that can't be computed: out of it, as soon as that is safe."""
        bad = self._quarantine.of(self.step)
        if bad is not None and self._loop is not None:
            self._loop.give_up(self.step, str(bad))

    async def _move_at_rest(self) -> None:
        """One instance leaves its node. Alone in its stage, it leaves a checkpoint of this step behind.

        Raises:
            MemberLost: somebody died before that was written.
            StageGone: it was alone; the checkpoint brings its stage back.
        """
        assert self._instances.graph is not None
        stages = self.stages()
        member = self._hand_over.next(stages, self._bringing, at_rest=True)
        if member is None:
            return
        stage = self._instances.graph.unit(member.sid).stage
        if stage < 0:
            self._move(member)
            return
        why = f"{member.sid} leaves its node"
        if not await self._unless_trouble(self._checkpoints.of_this_step(self.step, stages, why)):
            return  # it told why; the drain asks again
        log.info("hand-over by checkpoint", job=self._job, sid=member.sid, step=self.step)
        self._instances.mark_lost(member)
        self._replace(member.sid, member)
        raise StageGone(stage, why)

    def _brought(self, sid: str, task: asyncio.Task[None]) -> None:
        if self._bringing.get(sid) is task:
            del self._bringing[sid]
        member = self._instances.members.get(sid)
        if member in self._instances.lost and not task.cancelled() and task.exception() is None:
            self._replace(sid, member)  # it died as soon as it was there

    async def _until_brought(self) -> None:
        """Returns once every lost unit has its new incarnation."""
        while self._bringing:
            await self._unless_trouble(_all_of(self._bringing.values()))

    async def _roll_back(self, gone: StageGone) -> None:
        """Everyone takes the last checkpoint (or the seed): a stage was lost with its state."""
        began = time.monotonic()
        await self._journal.move(JobState.RECOVERING, gone.text)
        machine = await self._close_loop()
        attempt, generation = machine.attempt + 1, max(machine.generations) + 1
        version = self.step = await self._restore(attempt=attempt)
        text = f"{gone.text}: back after {time.monotonic() - began:.2f} s, all back to step {version}"
        self._faults.recovered(text)
        await self._journal.tell("recovery", text=text)
        await self._journal.move(JobState.RUNNING, f"step {version} of {self._spec.training.steps}")
        await self._open_loop(self._fresh(version, attempt, generation))
        self._decided_at = time.monotonic()

    # --- steps that can't be computed -----------------------------------------------------------------
    async def _leave_out(self, bad: BadMicrobatch) -> None:
        """On to the next step without the present one, with those that have the state; others join later.

        Raises:
            StageGone: nobody of a stage has it.
        """
        machine = await self._close_loop()
        before = Settled(
            step=self.step,
            attempt=machine.attempt + 1,
            generation=max(machine.generations) + 1,
            stages=machine.stages,
            data=machine.data,
        )
        omission = Omission(self._instances, self._record, self._epoch, self.losing)
        settled = self._living(before)
        await self._unless_trouble(omission.clear(self.step, before.attempt, settled.everyone))
        settled = self._living(settled)
        if all(settled.stages):
            decision = skip_decision(self._job, self._epoch, settled, bad)
            await self._unless_trouble(omission.carry_out(decision))
            self._left_out(bad)
            settled = self._living(replace(settled, step=self.step))
        await self._open_loop(settled)
        self._wake_standbys()
        self._welcome(settled)
        for stage, members in enumerate(settled.stages):
            if not members:
                raise StageGone(stage)

    def _living(self, settled: Settled) -> Settled:
        lost = self._instances.lost
        return replace(
            settled,
            stages=tuple(tuple(one for one in members if one not in lost) for members in settled.stages),
            data=tuple(one for one in settled.data if one not in lost),
        )

    def _left_out(self, bad: BadMicrobatch) -> None:
        self.step = bad.step + 1
        self._setbacks.committed(bad.step)
        self._quarantine.committed(bad.step)
        self._faults.left_out(bad)
        self._faults.committed(bad.step)
        self._say(lambda: self._tell_left_out(bad))

    async def _tell_left_out(self, bad: BadMicrobatch) -> None:
        await self._journal.note(step=bad.step + 1)
        await self._journal.tell("skipped", text=f"left out: {bad}", skipped_step=bad.step)

    def _welcome(self, settled: Settled) -> None:
        """Newcomers that came while no loop ran, or had not joined the one before, are told to this one."""
        assert self._loop is not None
        present = set(settled.everyone) | self._instances.lost
        for unit in self._instances.units:
            member, task = self._instances.members.get(unit.sid), self._bringing.get(unit.sid)
            if member is not None and member not in present and (task is None or task.done()):
                self._loop.post(ev.Arrived(member, unit.stage))

    # --- the loop and what it tells -------------------------------------------------------------------
    async def _abort(self, attempt: int) -> None:
        order = StepAbort(
            job=self._job,
            epoch=self._epoch,
            step=self.step,
            attempt=attempt,
            fenced=tuple(sorted(self._instances.lost, key=lambda one: (one.sid, one.incarnation))),
        )
        members = list(self._instances.members.values())
        await self._instances.order(STEP_ABORT, order, members, deadline_s=ABORT_DEADLINE_S)

    def _fresh(self, version: int, attempt: int, generation: int) -> Settled:
        """All instances are at `version`, and nothing was begun."""
        data = [
            self._instances.members[unit.sid] for unit in self._instances.units if unit.kind is UnitKind.DATA
        ]
        return Settled(
            step=version,
            attempt=attempt,
            generation=generation,
            stages=self._instances.stages(),
            data=data,
        )

    async def _open_loop(self, settled: Settled) -> None:
        machine = StepMachine(
            job=self._job,
            epoch=self._epoch,
            microbatches=self._spec.training.microbatches,
            clip_norm=self._spec.training.clip_norm,
            stages=settled.stages,
            data=settled.data,
            pauses=self._pauses,
            generation=settled.generation,
        )
        machine.attempt = settled.attempt
        self._loop = StepLoop(
            self._bus, self._spec, self._instances, machine, self._record, self, self._gateway
        )
        await self._loop.__aenter__()
        for member in sorted(self._instances.lost, key=lambda one: (one.sid, one.incarnation)):
            self._loop.lost(member)
        self._keep_copies()

    async def _close_loop(self) -> StepMachine:
        loop, self._loop = self._loop, None
        assert loop is not None
        self._last_attempt = loop.machine.attempt
        await loop.__aexit__(None, None, None)
        return loop.machine

    def _pauses(self, step: int) -> bool:
        return (
            step >= self._spec.training.steps
            or self._validation_due(step)
            or self._checkpoints.due(step)
            or self._quarantine.of(step) is not None
            or self._hand_over.waits(self.stages())
        )

    def decided(self, ledger: StepLedger, decision: StepDecision) -> None:
        now = time.monotonic()
        result = self._result(ledger, decision, now - self._decided_at)
        self._decided_at = now
        self.step = decision.step + 1
        self._setbacks.committed(decision.step)
        self._checkpoints.committed(result)
        self._say(lambda: self._tell_step(result))
        self._let_go()
        self._wake_standbys()

    def committed(self, step: int) -> None:
        for member, at in list(self._lost_at.items()):
            del self._lost_at[member]
            text = f"lost {member.sid}: back after {time.monotonic() - at:.2f} s at step {step + 1}"
            self._faults.recovered(text)
            self._say(lambda text=text: self._journal.tell("recovery", text=text))  # type: ignore[misc]
        self._quarantine.committed(step)
        self._faults.committed(step)
        self._give_up_bad()
        self._keep_copies()

    def losing(self, members: Iterable[Member], why: str) -> None:
        for member in list(members):
            self.lost(member, why)

    def replayed(self, replay: ev.Replay) -> None:
        text = f"{len(replay.replayed)} microbatches of the lost are computed again"
        log.info("replay", job=self._job, step=self.step, replayed=len(replay.replayed))
        self._say(lambda: self._journal.tell("recovery", text=text))

    def restarting(self, step: int, reason: str) -> None:
        log.warning("step begun again", job=self._job, step=step, reason=reason)
        self._say(lambda: self._journal.tell("fault", text=f"step {step} is begun again: {reason}"))
        self._setbacks.attempt_failed(step, reason)
        self._faults.broke(reason, [], [], step=step, attempt=self.attempt - 1)

    # --- copies at peers --------------------------------------------------------------------------------
    def _keep_copies(self) -> None:
        """Has every stage that has only one member now keep a copy at a peer."""
        if self._spec.parallel.copies and self._loop is not None:
            news = self._copies.revise(self.stages(), self._living_data())
            if news:
                self._spawn(self._copies.tell(news))

    def _living_data(self) -> tuple[Member, ...]:
        assert self._loop is not None
        return tuple(one for one in self._loop.machine.data if one not in self._instances.lost)

    async def bring_back(self, stage: int, version: int) -> Member | None:
        began = time.monotonic()
        peers = [one for members in self.stages() for one in members] + list(self._living_data())
        holder = await self._copies.find(stage, version, peers)
        newcomer = await self._newcomer(stage) if holder is not None else None
        if holder is None or newcomer is None:
            return None
        if not await self._copies.send(stage, version, holder, newcomer):
            return None
        text = f"stage {stage} is back from its copy at {holder.sid} after {time.monotonic() - began:.2f} s"
        self._say(lambda: self._journal.tell("recovery", text=f"{text}, at step {version}"))
        return newcomer

    async def _newcomer(self, stage: int) -> Member | None:
        """A new incarnation for a stage that has nobody, once it is there to take the state."""
        assert self._instances.graph is not None
        sids = {unit.sid for unit in self._instances.graph.stage(stage)}
        while self._loop is not None:
            machine = self._loop.machine
            for member in machine.newcomers:
                if machine.stage_of(member) == stage and member not in self._instances.lost:
                    return member
            bringing = [task for sid, task in self._bringing.items() if sid in sids and not task.done()]
            if not bringing:
                return None
            await asyncio.wait(bringing, return_when=asyncio.FIRST_COMPLETED)
        return None

    async def other_gateway(self, failed: str) -> None:
        why = f"gateway {failed} did not begin the step"
        self._faults.broke(why, [], [], step=self.step, attempt=self.attempt, entity=failed)
        await self._choose_other(failed)

    def _result(self, ledger: StepLedger, decision: StepDecision, step_s: float) -> StepResult:
        training = self._spec.training
        tokens = training.microbatches * training.microbatch_samples * self._spec.data.sample_tokens
        return StepResult(
            step=decision.step,
            loss=ledger.mean_loss(),
            gradient_norm=decision.gradient_norm,
            learning_rate=learning_rate(decision.step, training),
            tokens=tokens,
            step_s=step_s,
            tokens_per_s=tokens / max(step_s, 1e-9),
            attempt=decision.attempt,
            shares=ledger.shares(),
        )

    async def _tell_step(self, result: StepResult) -> None:
        first = self._journal.record.loss_first
        await self._journal.note(
            step=result.step + 1,
            loss_first=result.loss if first is None else first,
            loss_last=result.loss,
            tokens_per_s=result.tokens_per_s,
            **self._counted(),
        )
        await self._journal.tell("step", result=result)

    # --- telling, in order, and off the critical path -------------------------------------------------
    def _say(self, what: Callable[[], Awaitable[None]]) -> None:
        self._telling.put_nowait(what)

    async def _tell_in_order(self) -> None:
        while True:
            what = await self._telling.get()
            try:
                await what()
            finally:
                self._telling.task_done()

    async def told(self) -> None:
        """Returns once everything so far is on the job's stream."""
        await self._unless_trouble(self._telling.join())

    # --- boundaries -----------------------------------------------------------------------------------
    def _validation_due(self, step: int) -> bool:
        training = self._spec.training
        if not training.validation_microbatches or not self._spec.data.validation_fraction:
            return False
        if step == training.steps:
            return True
        return bool(training.validate_every) and step % training.validate_every == 0

    async def _validate(self) -> None:
        assert self._loop is not None
        evaluated = await self._loop.evaluate(self.step)
        await self.told()
        await self._journal.note(validation_loss=evaluated.mean)
        await self._journal.tell("validation", validation_step=self.step, validation_loss=evaluated.mean)

    # --- tasks ----------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self._trouble.done():
            self._trouble.set_exception(error)
            self._trouble.exception()  # seen, even if nobody waits just now

    async def _unless_trouble(self, work: Awaitable[Any]) -> Any:
        """Waits for `work`, unless something beside it ends the job."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._trouble}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return self._trouble.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task


async def _all_of(tasks: Iterable[asyncio.Task[None]]) -> Sequence[Any]:
    return await asyncio.gather(*tasks)
