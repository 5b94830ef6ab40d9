"""The processes of a simulated job: the real machines of instances, with numbers for tensors."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from entities.orchestrator.transaction import step_events as ev
from schemas.step import (
    Adopted,
    Member,
    MicrobatchDispatch,
    MicrobatchState,
    StepDecision,
    StepFenced,
    StepVote,
)
from tests.sim.arithmetic import Violation, mix
from tests.sim.following import Following
from workers.routing.next_hop import Binder
from workers.transaction.data_machine import DataMachine, Send
from workers.transaction.microbatch import Hop
from workers.transaction.stage_machine import Backward, Forward, Offer, ReportClaim, StageMachine

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(eq=False)
class Node:
    """A process: alive, frozen, or dead. What comes while it is frozen waits for it to wake up."""

    world: World
    member: Member
    alive: bool = True
    frozen: bool = False
    backlog: list[Callable[[], None]] = field(default_factory=list)

    def deliver(self, work: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.backlog.append(work)
            return
        work()

    def thaw(self) -> None:
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for work in backlog:
            self.deliver(work)


class StageNode(Node):
    """A stage instance: the real machine, one number as weights, a dict as sum."""

    def __init__(self, world: World, member: Member, stage: int, epoch: int) -> None:
        super().__init__(world, member)
        self.stage = stage
        last = stage == world.plan.stages - 1
        place = int(member.sid.rsplit("r", 1)[1])
        self.binder = Binder("a", place=place, microbatches=world.plan.microbatches, clock=lambda: world.now)
        self.machine = StageMachine(member, epoch=epoch, stage=stage, last=last, binder=self.binder)
        self.weights = mix(stage, 1)
        self.sum: dict[int, int] = {}
        self.generation = -1
        self.group: tuple[Member, ...] | None = None
        self.prepared: tuple[int, int, int, int, StepVote] | None = None
        self.computing = False
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.sending = 0
        self.loaded_at = 0.0
        self._followings: dict[Member, Following] = {}

    # --- compute ---
    def submit(self, priority: int, work: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (priority, next(self.order), work))
        self._next()

    def _next(self) -> None:
        if self.computing or not self.queue:
            return
        self.computing = True
        _, _, work = heapq.heappop(self.queue)

        def done() -> None:
            self.computing = False
            work()
            self._next()

        self.world.after(self.world.rng.uniform(0.005, 0.03), lambda: self.deliver(done))

    def run(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Forward(hop):
                    self.submit(2, lambda hop=hop: self._forward(hop))
                case Backward(hop):
                    self.submit(1, lambda hop=hop: self._backward(hop))
                case Offer(hop, to, direction):
                    self.world.hops.offer(self, hop, to, direction)
                case ReportClaim(hop):
                    self.world.claim(self, hop)

    def _forward(self, hop: Hop) -> None:
        if not self.machine.current(hop):
            return
        (value,) = hop.inputs
        hop.sent_forward = (mix(value, self.weights),)
        if self.machine.last:
            self._accumulate(hop, 0)
        self.run(self.machine.forwarded(hop))

    def _backward(self, hop: Hop) -> None:
        if not self.machine.current(hop):
            return
        assert hop.returned is not None
        (gradient,) = hop.returned
        self._accumulate(hop, gradient)
        self.run(self.machine.accumulated(hop))

    def _accumulate(self, hop: Hop, gradient: int) -> None:
        (value,) = hop.inputs
        if hop.microbatch in self.sum:
            raise Violation(f"{self.member} adds microbatch {hop.microbatch} of step {hop.step} twice")
        self.sum[hop.microbatch] = mix(value, gradient, self.weights, 3)
        hop.sent_backward = (mix(value, gradient, self.weights, 4),)

    # --- orders ---
    def fence(self, order: ev.Fence) -> StepFenced | None:
        machine = self.machine
        if machine.version != order.step or machine.attempt != order.attempt:
            return None
        self.apply_fence(order.fenced)
        held = machine.answer_round((machine.epoch, order.attempt, order.round))
        if self.group is not None and set(self.group) & set(order.fenced):
            self.release()
        return StepFenced(
            member=self.member,
            version=machine.version,
            round=order.round,
            held=held,
            claims=tuple(
                self.world.claim_of(self, hop)
                for hop in machine.hops.values()
                if hop.state is MicrobatchState.ACCUMULATED and hop.step == machine.version
            ),
        )

    def apply_fence(self, fenced: Sequence[Member]) -> None:
        self.machine.fence(fenced)
        self.end_following(fenced)

    def follow(self, target: StageNode, transfer: int) -> Following | None:
        """None: a later transfer has begun."""
        present = self._followings.get(target.member)
        if present is not None and present.transfer > transfer:
            return None
        if present is None or present.transfer < transfer:
            self.end_following([target.member])
            self._followings[target.member] = present = Following(self.world, self, target, transfer)
        return present

    def end_following(self, members: Sequence[Member]) -> None:
        for member in members:
            following = self._followings.pop(member, None)
            if following is not None:
                following.end()

    def redo(self, step: int, total: int) -> None:
        """A step again, as it was applied elsewhere."""
        if self.machine.is_member:
            raise Violation(f"{self.member} is a member, and takes the redo of step {step}")
        self.weights = mix(self.weights, total)
        self.run(self.machine.applied(step + 1))

    def release(self) -> None:
        self.group = None
        self.prepared = None

    def form(self, order: ev.FormGroup) -> str | None:
        if order.generation < self.generation:
            return "stale"
        self.apply_fence(order.fenced)
        if order.attempt > self.machine.attempt:
            self.machine.restarted(order.attempt)
        self.machine.admitted(order.step, (self.machine.epoch, order.attempt, order.round))
        self.end_following(order.members)
        if order.generation > self.generation:
            self.release()
            self.generation = order.generation
        if self.world.meet(order, self):
            self.group = order.members
            return "formed"
        return None

    def prepare(self, order: ev.Prepare) -> StepVote | str | None:
        at = (order.step, order.attempt)
        if at != (self.machine.version, self.machine.attempt) or order.generation != self.generation:
            return "conflict"
        if self.group is None:
            return "conflict"
        if self.prepared is not None and self.prepared[:3] == (*at, order.generation):
            return self.prepared[4]
        total = self.world.reduce(order, self)
        if total is None:
            return None
        vote = StepVote(
            member=self.member,
            step=order.step,
            attempt=order.attempt,
            generation=order.generation,
            microbatches=tuple(
                sorted(self.world.contributed[order.stage, order.generation, at][self.member][0])
            ),
            checksum=f"{total:016x}",
            squared_norms=(1.0,),
        )
        self.prepared = (*at, order.generation, total, vote)
        return vote

    def commit(self, decision: StepDecision) -> str | None:
        if decision.epoch < self.machine.epoch:
            return "fenced"
        if self.machine.version == decision.step + 1:
            return "applied"
        if self.sending:
            return None
        if self.prepared is None or self.prepared[0] != decision.step:
            return "conflict"
        if f"{self.prepared[3]:016x}" != decision.checksums[self.stage]:
            raise Violation(f"{self.member} is to apply another gradient than it prepared")
        if self.world.decisions.get(decision.step) != decision.checksums:
            raise Violation(f"{self.member} applies step {decision.step} without a record")
        total = self.prepared[3]
        self.weights = mix(self.weights, total)
        self.prepared = None
        self.sum = {}
        self.run(self.machine.applied(decision.step + 1))
        for following in list(self._followings.values()):
            following.applied(decision.step, total)
        return "applied"

    def restart(self, order: ev.Restart) -> str | None:
        self.apply_fence(order.fenced)
        if order.attempt > self.machine.attempt:
            self.machine.is_member = True
            self.machine.restarted(order.attempt)
            self.queue.clear()
            self.sum = {}
            self.release()
        return "restarted"

    def adopt(self, epoch: int) -> Adopted | None:
        if epoch < self.machine.epoch:
            return None
        self.machine.epoch = epoch
        return Adopted(
            member=self.member,
            version=self.machine.version,
            attempt=self.machine.attempt,
            generation=self.generation,
            prepared=self.prepared[0] if self.prepared else -1,
        )


class DataNode(Node):
    """A data instance."""

    stage = -1

    def __init__(self, world: World, member: Member, epoch: int) -> None:
        super().__init__(world, member)
        self.binder = Binder("a", microbatches=world.plan.microbatches, clock=lambda: world.now)
        self.machine = DataMachine(member, epoch=epoch, binder=self.binder)

    def run(self, effects: Sequence[Send]) -> None:
        for effect in effects:
            self.world.hops.offer_data(self, effect)

    def dispatch(self, order: MicrobatchDispatch) -> str | None:
        if order.epoch != self.machine.epoch:
            return None  # refused
        self.run(self.machine.dispatch(order))
        return "ok"

    def fence(self, order: ev.Fence) -> StepFenced | None:
        self.run(self.machine.fence(order.fenced))
        return StepFenced(
            member=self.member,
            version=order.step,
            round=order.round,
            held=self.machine.answer_round(order.step, (self.machine.epoch, order.attempt, order.round)),
        )

    def restart(self, order: ev.Restart) -> str | None:
        self.run(self.machine.fence(order.fenced))
        if order.attempt > self.machine.attempt:
            self.machine.restarted(order.attempt)
        return "restarted"

    def adopt(self, epoch: int) -> Adopted | None:
        if epoch < self.machine.epoch:
            return None
        self.machine.epoch = epoch
        return Adopted(
            member=self.member, version=self.machine.step, attempt=self.machine.attempt, generation=-1
        )
