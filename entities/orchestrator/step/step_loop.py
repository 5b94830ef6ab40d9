"""The step transaction's shell (DESIGN §5): gives events to the step machine, and carries out its effects.

All decisions are made in `step_machine`; the orders are in `step_orders`, the repair of claims that the bus
lost is in `claim_repair`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal, TypeVar

from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.retry_limits import StepBroken
from entities.orchestrator.step.claim_repair import ClaimRepair
from entities.orchestrator.step.evaluation import Evaluation, evaluate
from entities.orchestrator.step.step_observer import StepObserver
from entities.orchestrator.step.step_orders import StepOrders
from entities.orchestrator.step.validation_pass import PassBroken, ValidationPass
from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.errors import DmscError
from schemas.evaluation_sets import evaluation_sets
from schemas.job import StepPhases
from schemas.limits import TICK_S
from schemas.step import Member, MicrobatchClaim, Phase

T = TypeVar("T")


class StageGone(DmscError):
    """No member of a stage lives any more: its state must come from elsewhere."""

    code = "stage_gone"

    def __init__(self, stage: int, why: str = "") -> None:
        super().__init__(why or f"stage {stage} has lost all its instances")
        self.stage = stage


class StepGivenUp(DmscError):
    """The open step can't be computed by any instance: this loop is over, and its members wait."""

    code = "step_given_up"


class StepLoop:
    """Runs the steps of one job, as an async context: orders and answers go on between steps, too."""

    def __init__(self, job: JobContext, machine: StepMachine, observer: StepObserver) -> None:
        self._job = job
        self._observer = observer
        self.machine = machine
        self._tasks = GuardedTasks()
        self._orders = StepOrders(job, machine, observer, self.post)
        self._repair = ClaimRepair(job, machine, self.claimed, self.post)
        self._pending: deque[ev.Event] = deque()
        self._deciding = False
        self.clock = StepClock()
        self._boundary: asyncio.Future[int] | None = None
        self._validation: ValidationPass | None = None
        self._remove_callback: Callable[[], None] = lambda: None

    async def __aenter__(self) -> StepLoop:
        self._remove_callback = self._job.bus.on_reconnect(self._repair.reconnected)
        self._job.claims[self._job.name] = self.claimed
        self._tasks.spawn(self._repair.run())
        self._tasks.spawn(self._ticks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_callback()
        self._job.claims.pop(self._job.name, None)
        await self._tasks.close()

    # --- what its owner calls -------------------------------------------------------------------------
    async def to_boundary(self, step: int) -> int:
        """Runs steps from `step` on; returns the step before which a pause is wanted.

        Raises:
            StageGone: a stage has lost all its members; this loop can't go on.
            StepGivenUp: see `give_up`.
            Fenced: another orchestrator leads this job.
            StepBroken: the step has failed too often.
        """
        self._boundary = asyncio.get_running_loop().create_future()
        self.post(ev.Opened(step, self.machine.attempt))
        return await self._tasks.unless_failed(self._boundary)

    async def pause(self) -> None:
        """Waits a moment; raises the failure of this loop, if it has one."""
        await self.beside(asyncio.sleep(self._job.times.steps.repeat_s))

    async def beside(self, waiting: Awaitable[T]) -> T:
        """Waits beside this loop; raises its failure, if it has one."""
        return await self._tasks.unless_failed(waiting)

    def give_up(self, step: int, why: str) -> None:
        """Ends the loop if `step` is open and not decided: then all members are at its version."""
        if (self.machine.step, self.machine.phase) == (step, Phase.GATHERING):
            self._tasks.fail(StepGivenUp(why))

    def break_off(self, error: StepBroken) -> None:
        """Ends the loop with `error`, whatever is under way."""
        self._tasks.fail(error)

    @property
    def over(self) -> bool:
        """The loop has failed: nothing more is decided."""
        return self._tasks.failed

    def post(self, event: ev.Event) -> None:
        """Gives an event to the machine, and starts to carry out the effects that it returns."""
        if isinstance(event, ev.Begun):
            self.clock.mark("begun")
        self._pending.append(event)
        if self._deciding:
            return
        self._deciding = True
        try:
            while self._pending and not self._tasks.failed:
                for effect in self.machine.decide(self._pending.popleft(), time.monotonic()):
                    self._carry_out(effect)
        except Exception as error:
            self._tasks.fail(error)
        finally:
            self._deciding = False

    def lost(self, member: Member) -> None:
        """This incarnation no longer counts; `JobInstances` knows that already."""
        self.post(ev.IncarnationLost(member))

    def claimed(self, claim: MicrobatchClaim) -> None:
        """A claim arrived, from the bus or in an answer to `StepStatus`."""
        machine = self.machine
        if (claim.job, claim.epoch, claim.attempt) != (machine.job, machine.epoch, machine.attempt):
            return
        if not claim.evaluate:
            self.post(ev.Claimed(claim))
            self._repair.heard()
        elif self._validation is not None:
            self._validation.claimed(claim)

    async def validate(self, version: int) -> Evaluation:
        """The validation at a boundary.

        If a member is lost meanwhile, the pass begins again with the remaining members.
        """
        while True:
            try:
                return await self._validate(version)
            except PassBroken as broken:
                self._boundary = None
                self.post(ev.Stalled(f"validation at step {version}: {broken.text}"))
                while not self.machine.settled:
                    await self.pause()

    async def _validate(self, version: int) -> Evaluation:
        spec = self._job.spec
        count = sum(microbatches for _, microbatches in evaluation_sets(spec))
        self._validation = ValidationPass(self.machine, self._orders, self._repair, version, count)
        try:
            return evaluate(spec, await self._tasks.unless_failed(self._validation.run()), version)
        finally:
            self._validation = None

    # --- effects --------------------------------------------------------------------------------------
    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Begin(step, attempt):
                self.clock.begin()
                self._repair.begun()
                self._tasks.spawn(self._orders.begin_step(step, attempt))
            case ev.Fence():
                self._tasks.spawn(self._orders.fence(effect))
            case ev.Assign():
                self._tasks.spawn(self._orders.assign(effect))
            case ev.FormGroup():
                self._tasks.spawn(self._orders.form(effect))
            case ev.Prepare():
                self.clock.mark("prepare")
                for place in range(len(effect.members)):
                    self._tasks.spawn(self._orders.prepare(effect, place))
            case ev.Record(decision):
                self.clock.mark("record")
                self._tasks.spawn(self._orders.record(decision))
            case ev.Commit(decision, ledger):
                self._observer.decided(ledger, decision)
                self._tasks.spawn(self._orders.commit(decision))
            case ev.Boundary(step):
                if self._boundary is not None and not self._boundary.done():
                    self._boundary.set_result(step)
            case ev.SendState():
                send = self._orders.follow if effect.follow else self._orders.send_state
                self._tasks.spawn(send(effect))
            case ev.AwaitState():
                self._tasks.spawn(self._orders.await_state(effect))
            case ev.Withdraw():
                self._tasks.spawn(self._orders.withdraw(effect))
            case ev.StageLost(stage, version):
                if not self._job.spec.parallel.copies:
                    raise StageGone(stage)
                self._tasks.spawn(self._bring_back(stage, version))
            case ev.Condemn(member, reason):
                self._observer.losing([member], reason)
            case ev.Restart():
                self._observer.restarting(self.machine.step, effect.reason)
                self._tasks.spawn(self._orders.restart(effect))
            case ev.RecomputationNoted():
                self._observer.replayed(effect)

    async def _bring_back(self, stage: int, version: int) -> None:
        newcomer = await self._observer.bring_back(stage, version)
        if newcomer is None or version != self.machine.step:
            raise StageGone(stage)
        self.post(ev.Restored(stage, (newcomer,)))

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.post(ev.Tick())


Mark = Literal["begun", "prepare", "record"]


class StepClock:
    """The times of the open step. The last mark of each name counts: that of the last stage's prepare."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._marks: dict[Mark, float] = {}

    def begin(self) -> None:
        """The step, or another attempt of it, begins."""
        self._began, self._marks = time.monotonic(), {}

    def mark(self, name: Mark) -> None:
        self._marks[name] = time.monotonic()

    def phases(self) -> StepPhases | None:
        """The step's phases up to now; None if an earlier loop began the step."""
        if self._began is None:
            return None
        now = time.monotonic()
        begun = self._marks.get("begun", now)
        prepare = max(begun, self._marks.get("prepare", now))
        record = max(prepare, self._marks.get("record", now))
        return StepPhases(
            begin_s=begun - self._began,
            claims_s=prepare - begun,
            prepare_s=record - prepare,
            decide_s=now - record,
        )
