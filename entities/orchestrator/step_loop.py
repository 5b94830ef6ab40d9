"""The step transaction's shell (DESIGN §5): it carries out what the step machine asks for.

Everything that is decided is decided in `step_machine`; here are the orders and their answers, the record's
compare-and-set that is the commit point, the repair of what the bus lost, and validation at a boundary.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import (
    GROUP_FORM,
    STATE_SEND,
    STATE_WAIT,
    STEP_ABORT,
    STEP_ASSIGN,
    STEP_BEGIN,
    STEP_COMMIT,
    STEP_FENCE,
    STEP_PREPARE,
    STEP_STATUS,
)
from entities.orchestrator import step_events as ev
from entities.orchestrator.decision_record import DecisionRecord
from entities.orchestrator.instances import Instances, MemberLost
from entities.orchestrator.step_ledger import StepLedger
from entities.orchestrator.step_machine import StepMachine
from schemas.errors import DmscError, Fenced, Unavailable
from schemas.job import JobSpec
from schemas.step import (
    GroupForm,
    Member,
    MicrobatchClaim,
    PathUpdate,
    Phase,
    StateSend,
    StateWait,
    StepAbort,
    StepAssign,
    StepBegin,
    StepCommit,
    StepDecision,
    StepFence,
    StepFenced,
    StepPrepare,
    StepStatus,
    StepStatusReply,
    StepVote,
)

log = get_logger("orchestrator")

BEGIN_DEADLINE_S = 5.0
"""Longer than a gateway takes to start again; then another one dispatches."""
FENCE_DEADLINE_S = 20.0
PREPARE_DEADLINE_S = 30.0
SLOWEST_BYTES_PER_S = 4e6
"""A reduction slower than this counts as broken (the instances reckon with the same)."""
COMMIT_DEADLINE_S = 30.0
GROUP_DEADLINE_S = 20.0
STATE_DEADLINE_S = 120.0
TICK_S = 0.1
AGAIN_S = 0.2
"""Pause before an order that failed without a culprit is given again."""
QUIET_S = 1.0
"""Without a claim for this long, instances are asked what they hold (rule 11)."""
STALL_S = 30.0
"""Without progress for max(this, 10 × the way through the pipeline): the step is begun again."""


class StageGone(DmscError):
    """Nobody of a stage lives any more: its state must come from elsewhere."""

    code = "stage_gone"

    def __init__(self, stage: int, why: str = "") -> None:
        super().__init__(why or f"stage {stage} has lost all its instances")
        self.stage = stage


class StepGivenUp(DmscError):
    """The open step can't be computed, whoever tries: this loop is over, and its members wait."""

    code = "step_given_up"


@dataclass(frozen=True)
class Evaluated:
    """Validation losses by microbatch."""

    losses: dict[int, float]

    @property
    def mean(self) -> float:
        return math.fsum(self.losses[number] for number in sorted(self.losses)) / len(self.losses)


class Observer(Protocol):
    """Who runs the loop, and is told; none of it may wait."""

    def decided(self, ledger: StepLedger, decision: StepDecision) -> None:
        """The commit point of a step is passed."""

    def committed(self, step: int) -> None:
        """All living members have applied the step."""

    def losing(self, members: Iterable[Member], why: str) -> None:
        """These did not answer, or cannot work with the others; the observer calls `lost` for them."""

    def replayed(self, replay: ev.Replay) -> None:
        """Microbatches of the lost are computed again."""

    def restarting(self, step: int, reason: str) -> None:
        """The open step is begun again; raises `Unrecoverable` if that was once too often."""

    async def bring_back(self, stage: int, version: int) -> Member | None:
        """Nobody of a stage lives: a newcomer that holds its state at `version` again; None if none can."""

    async def other_gateway(self, failed: str) -> None:
        """The entry gateway does not answer: name another one."""


class StepLoop:
    """Runs steps of one job. `async with` it: orders and answers go on between steps, too."""

    def __init__(
        self,
        bus: Bus,
        spec: JobSpec,
        instances: Instances,
        machine: StepMachine,
        record: DecisionRecord,
        observer: Observer,
        gateway: Callable[[], str],
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._instances = instances
        self._record = record
        self._observer = observer
        self._gateway = gateway
        self._job = machine.job
        self._epoch = machine.epoch
        self.machine = machine
        self._pending: deque[ev.Event] = deque()
        self._deciding = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._boundary: asyncio.Future[int] | None = None
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._evaluation: dict[int, float] | None = None
        self._progress = asyncio.Event()
        self._look = asyncio.Event()
        self._forget_callback: Callable[[], None] = lambda: None
        self._moved_at = time.monotonic()

    async def __aenter__(self) -> StepLoop:
        self._forget_callback = self._bus.on_reconnect(self._reconnected)
        self._spawn(self._watch())
        self._spawn(self._ticks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget_callback()
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _reconnected(self) -> None:
        """Claims may have been lost meanwhile: ask at once."""
        self._look.set()
        self._progress.set()

    # --- what its owner calls -------------------------------------------------------------------------
    async def to_boundary(self, step: int) -> int:
        """Runs steps from `step` on; returns the step before which a pause is wanted.

        Raises:
            StageGone: a stage lost everyone; nothing of this loop can go on.
            StepGivenUp: see `give_up`.
            Fenced: another orchestrator leads this job.
            Unrecoverable: something breaks the step each time.
        """
        self._boundary = asyncio.get_running_loop().create_future()
        self.post(ev.Opened(step, self.machine.attempt))
        boundary: int = await self._unless_failed(self._boundary)
        return boundary

    async def pause(self) -> None:
        """Waits a moment for others, or raises what ends this loop."""
        await self._unless_failed(asyncio.ensure_future(asyncio.sleep(AGAIN_S)))

    def give_up(self, step: int, why: str) -> None:
        """Ends the loop in `step`, if that is open and not decided; members are all at its version then."""
        if (self.machine.step, self.machine.phase) == (step, Phase.GATHERING):
            self._fail(StepGivenUp(why))

    @property
    def over(self) -> bool:
        """It has failed: nothing more is decided."""
        return self._failure is not None

    def post(self, event: ev.Event) -> None:
        """Has the machine decide about an event, and begins to carry out what it asks for."""
        self._pending.append(event)
        if self._deciding:
            return
        self._deciding = True
        try:
            while self._pending and self._failure is None:
                for effect in self.machine.decide(self._pending.popleft(), time.monotonic()):
                    self._carry_out(effect)
        except Exception as error:
            self._fail(error)
        finally:
            self._deciding = False

    def lost(self, member: Member) -> None:
        """This incarnation counts no more (the instances have been told)."""
        self.post(ev.Lost(member))

    def claimed(self, claim: MicrobatchClaim) -> None:
        """A claim came in (from the bus, or in an answer to `StepStatus`)."""
        if (claim.job, claim.epoch, claim.attempt) != (self._job, self._epoch, self.machine.attempt):
            return
        if not claim.evaluate:
            self.post(ev.Claimed(claim))
            self._progress.set()
        elif self._evaluation is not None and claim.loss is not None:
            self._evaluation[claim.microbatch] = claim.loss
            self._progress.set()

    async def evaluate(self, version: int) -> Evaluated:
        """One validation pass at a boundary: forward only, losses from the last stage.

        A loss on the way begins it again with whoever is left.
        """
        while True:
            try:
                found: Evaluated = await self._unless_failed(asyncio.ensure_future(self._evaluate(version)))
                return found
            except _Again as again:
                self._boundary = None
                self.post(ev.Stalled(f"validation at step {version}: {again.text}"))
                while not self.machine.settled:
                    await self.pause()

    async def _evaluate(self, version: int) -> Evaluated:
        self._evaluation = {}
        attempt, members = self.machine.attempt, self.machine.stages
        try:
            await self._begin(version, attempt, evaluate=True)
            count = self._spec.training.validation_microbatches
            moved_at = time.monotonic()
            while len(self._evaluation) < count:
                self._progress.clear()
                try:
                    async with asyncio.timeout(QUIET_S):
                        await self._progress.wait()
                    moved_at = time.monotonic()
                except TimeoutError:
                    await self._ask(version, self.machine.stages[-1], evaluate=True)
                    if time.monotonic() - moved_at > self._patience_s():
                        raise _Again("no progress") from None
                if (self.machine.attempt, self.machine.stages) != (attempt, members):
                    raise _Again("somebody was lost, or joined")
            return Evaluated(dict(self._evaluation))
        finally:
            self._evaluation = None

    # --- tasks and failures ---------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()

    async def _unless_failed(self, work: asyncio.Future[Any]) -> Any:
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({work, failed}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            assert self._failure is not None
            raise self._failure
        finally:
            failed.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    # --- effects --------------------------------------------------------------------------------------
    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Begin(step, attempt):
                self._moved_at = time.monotonic()
                self._spawn(self._begin_step(step, attempt))
            case ev.Fence():
                self._spawn(self._fence(effect))
            case ev.Assign():
                self._spawn(self._assign(effect))
            case ev.FormGroup():
                self._spawn(self._form(effect))
            case ev.Prepare():
                for member in effect.members:
                    self._spawn(self._prepare(effect, member))
            case ev.Record(decision):
                self._spawn(self._decide(decision))
            case ev.Commit(decision, ledger):
                self._observer.decided(ledger, decision)
                self._spawn(self._commit(decision))
            case ev.Boundary(step):
                if self._boundary is not None and not self._boundary.done():
                    self._boundary.set_result(step)
            case ev.SendState():
                self._spawn(self._send_state(effect))
            case ev.Withdraw():
                self._spawn(self._withdraw(effect))
            case ev.StageLost(stage, version):
                if not self._spec.parallel.copies:
                    raise StageGone(stage)
                self._spawn(self._bring_back(stage, version))
            case ev.Condemn(member, reason):
                self._observer.losing([member], reason)
            case ev.Restart():
                self._observer.restarting(self.machine.step, effect.reason)
                self._spawn(self._restart(effect))
            case ev.Replay():
                self._observer.replayed(effect)

    async def _begin_step(self, step: int, attempt: int) -> None:
        """Has the gateway dispatch, whichever can; given up once the step is begun anew."""
        while (step, attempt) == (self.machine.step, self.machine.attempt):
            gateway = self._gateway()
            try:
                await self._begin(step, attempt)
                self.post(ev.Begun(step, attempt))
                return
            except Unavailable as error:
                if gateway == self._gateway() and self.machine.data:
                    log.warning("step not begun", job=self._job, step=step, reason=str(error))
                    await self._observer.other_gateway(gateway)
            except DmscError as error:
                log.warning("step not begun", job=self._job, step=step, reason=str(error))
            await asyncio.sleep(AGAIN_S)

    async def _begin(self, step: int, attempt: int, *, evaluate: bool = False) -> None:
        training = self._spec.training
        count = training.validation_microbatches if evaluate else training.microbatches
        order = StepBegin(
            job=self._job,
            epoch=self._epoch,
            step=step,
            attempt=attempt,
            microbatches=tuple(range(count)),
            evaluate=evaluate,
        )
        gateway = self._gateway()
        await self._bus.command(
            STEP_BEGIN, order, deadline_s=BEGIN_DEADLINE_S, job=self._job, gateway=gateway
        )

    async def _fence(self, effect: ev.Fence) -> None:
        order = StepFence(
            job=self._job,
            epoch=self._epoch,
            step=effect.step,
            attempt=effect.attempt,
            round=effect.round,
            fenced=effect.fenced,
        )
        answers = await self._ordered(STEP_FENCE, order, effect.targets, FENCE_DEADLINE_S)
        if answers is not None:
            told = tuple(answer for answer in answers.values() if isinstance(answer, StepFenced))
            self.post(ev.Fenced(effect.round, told))

    async def _assign(self, effect: ev.Assign) -> None:
        async def one(member: Member, paths: tuple[PathUpdate, ...]) -> bool:
            order = StepAssign(
                job=self._job,
                epoch=self._epoch,
                step=effect.step,
                attempt=effect.attempt,
                round=effect.round,
                paths=paths,
            )
            return await self._ordered(STEP_ASSIGN, order, [member], FENCE_DEADLINE_S) is not None

        if all(await asyncio.gather(*(one(member, paths) for member, paths in effect.paths.items()))):
            self.post(ev.Assigned(effect.round))

    async def _ordered(
        self, row: Any, order: Any, members: Iterable[Member], deadline_s: float
    ) -> Mapping[str, Any] | None:
        """The answers; None if somebody was lost (that is told) or refuses (the step is begun again)."""
        try:
            return await self._instances.order(row, order, members, deadline_s=deadline_s)
        except MemberLost as lost:
            self._observer.losing(lost.members, str(lost))
        except Fenced:
            raise
        except DmscError as error:
            self.post(ev.Stalled(str(error)))
        return None

    async def _form(self, effect: ev.FormGroup) -> None:
        order = GroupForm(
            job=self._job,
            epoch=self._epoch,
            stage=effect.stage,
            step=effect.step,
            attempt=effect.attempt,
            round=effect.round,
            generation=effect.generation,
            members=effect.members,
            fenced=effect.fenced,
        )
        try:
            await self._instances.order(GROUP_FORM, order, effect.members, deadline_s=GROUP_DEADLINE_S)
        except MemberLost as lost:
            self._observer.losing(lost.members, str(lost))
        except DmscError as error:
            log.info("group not formed", job=self._job, stage=effect.stage, reason=str(error))
            self.post(ev.GroupFailed(effect.stage, effect.generation))
        else:
            self.post(ev.GroupFormed(effect.stage, effect.generation))

    async def _prepare(self, effect: ev.Prepare, member: Member) -> None:
        order = StepPrepare(
            job=self._job,
            epoch=self._epoch,
            step=effect.step,
            attempt=effect.attempt,
            generation=effect.generation,
        )
        deadline_s = PREPARE_DEADLINE_S + 4 * self._instances.sum_bytes / SLOWEST_BYTES_PER_S
        try:
            answers = await self._instances.order(STEP_PREPARE, order, [member], deadline_s=deadline_s)
        except MemberLost as lost:
            self._observer.losing(lost.members, str(lost))
        except DmscError as error:
            log.info("not prepared", job=self._job, sid=member.sid, reason=str(error))
            self.post(ev.GroupFailed(effect.stage, effect.generation))
        else:
            vote = answers[member.sid]
            assert isinstance(vote, StepVote)
            self.post(ev.Voted(effect.stage, vote))

    async def _decide(self, decision: StepDecision) -> None:
        await self._record.write(decision)
        self.post(ev.Recorded(decision))

    async def _commit(self, decision: StepDecision) -> None:
        """Has every member apply the decision.

        Whoever does not answer is lost to the job, whatever became of it: the decision stands (rule 6).
        """
        silent: list[Member] = []

        async def one(stage: int, member: Member) -> None:
            order = commit_order(decision, stage, self._epoch)
            try:
                await self._instances.order(STEP_COMMIT, order, [member], deadline_s=COMMIT_DEADLINE_S)
            except DmscError as error:
                if isinstance(error, Fenced):
                    raise
                log.warning("not committed", job=self._job, sid=member.sid, reason=str(error))
                silent.append(member)

        await asyncio.gather(
            *(one(stage, member) for stage, members in enumerate(decision.membership) for member in members)
        )
        self.post(ev.Committed(decision.step, tuple(silent)))
        self._observer.committed(decision.step)
        if silent:
            self._observer.losing(silent, f"no commit of step {decision.step}")

    async def _send_state(self, effect: ev.SendState) -> None:
        send = StateSend(job=self._job, epoch=self._epoch, to=effect.to, version=effect.version)
        wait = StateWait(job=self._job, epoch=self._epoch, version=effect.version)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(
                    self._instances.order(STATE_SEND, send, [effect.source], deadline_s=STATE_DEADLINE_S)
                )
                both.create_task(
                    self._instances.order(STATE_WAIT, wait, [effect.to], deadline_s=STATE_DEADLINE_S)
                )
        except* DmscError as errors:
            stage = self.machine.stage_of(effect.to)
            self.post(ev.JoinFailed(effect.to))
            for error in errors.exceptions:
                if isinstance(error, MemberLost):
                    self._observer.losing(error.members, str(error))
            log.info("state not sent", job=self._job, to=effect.to.sid, reason=str(errors.exceptions[0]))
            if stage is not None:
                await asyncio.sleep(AGAIN_S)
                if effect.to not in self._instances.lost:
                    self.post(ev.Arrived(effect.to, stage))
        else:
            self.post(ev.Joined(effect.to, effect.version))

    async def _withdraw(self, effect: ev.Withdraw) -> None:
        """A fence like any other, but of no round: nothing is mended by what it answers."""
        order = StepFence(
            job=self._job,
            epoch=self._epoch,
            step=effect.step,
            attempt=effect.attempt,
            round=0,
            fenced=(effect.newcomer,),
        )
        try:
            await self._instances.order(STEP_FENCE, order, [effect.source], deadline_s=FENCE_DEADLINE_S)
        except Fenced:
            raise
        except DmscError as error:  # whoever is behind with the step has fenced nevertheless
            log.info("state not withdrawn", job=self._job, sid=effect.source.sid, reason=str(error))

    async def _bring_back(self, stage: int, version: int) -> None:
        newcomer = await self._observer.bring_back(stage, version)
        if newcomer is None or version != self.machine.step:
            raise StageGone(stage)
        self.post(ev.Restored(stage, (newcomer,)))

    async def _restart(self, effect: ev.Restart) -> None:
        order = StepAbort(
            job=self._job,
            epoch=self._epoch,
            step=self.machine.step,
            attempt=effect.attempt,
            fenced=effect.fenced,
        )

        async def one(member: Member) -> None:
            try:
                await self._instances.order(STEP_ABORT, order, [member], deadline_s=FENCE_DEADLINE_S)
            except Fenced:
                raise
            except DmscError as error:
                self._observer.losing([member], str(error))

        await asyncio.gather(*(one(member) for member in effect.targets))
        self.post(ev.Restarted(effect.attempt))

    # --- repair ---------------------------------------------------------------------------------------
    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.post(ev.Tick())

    async def _watch(self) -> None:
        """Repairs lost claims; gives up on a step that no longer moves."""
        while True:
            self._progress.clear()
            try:
                async with asyncio.timeout(QUIET_S):
                    await self._progress.wait()
                self._moved_at = time.monotonic()
                if not self._look.is_set():
                    continue
            except TimeoutError:
                pass
            self._look.clear()
            machine = self.machine
            if machine.phase is not Phase.GATHERING or not machine.settled or not machine.ledger.missing():
                self._moved_at = time.monotonic()  # its orders have their own deadlines
                continue
            held = len(machine.ledger.claims)
            await self._ask(machine.step, [one for members in machine.stages for one in members])
            if len(machine.ledger.claims) > held:
                self._moved_at = time.monotonic()
            times = sorted(claim.forward_ms + claim.backward_ms for claim in machine.ledger.claims.values())
            patience = max(self._patience_s(), 0.02 * times[len(times) // 2] if times else 0.0)
            if time.monotonic() - self._moved_at > patience:
                self._moved_at = time.monotonic()
                missing = machine.ledger.missing()[:4]
                self.post(
                    ev.Stalled(f"step {machine.step}: no progress for {patience:.0f} s, missing {missing}")
                )

    def _patience_s(self) -> float:
        """A first claim needs a whole way through the pipeline: ten times what was measured for that."""
        return max(STALL_S, 10 * self._instances.expected_ms / 1e3)

    async def _ask(self, step: int, members: Iterable[Member], *, evaluate: bool = False) -> None:
        """Asks instances what they hold of a step, and counts what they say like claims."""
        query = StepStatus(
            job=self._job, epoch=self._epoch, step=step, attempt=self.machine.attempt, evaluate=evaluate
        )

        async def one(sid: str) -> None:
            try:
                reply = await self._bus.request(STEP_STATUS, query, timeout_s=2.0, job=self._job, sid=sid)
            except DmscError:
                return
            assert isinstance(reply, StepStatusReply)
            for claim in reply.claims:
                self.claimed(claim)

        await asyncio.gather(*(one(member.sid) for member in members))


class _Again(DmscError):
    """The validation pass has to be repeated."""

    code = "again"


def commit_order(decision: StepDecision, stage: int, epoch: int) -> StepCommit:
    """What the members of `stage` are told of a decision, by the orchestrator of `epoch`."""
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
    )
