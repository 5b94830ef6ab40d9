"""Instances of a simulated job: those of `dmsc.simulation`, with numbers for tensors; they may freeze."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dmsc.simulation.instances import BACKWARD, FORWARD, DataInstance, StageInstance
from dmsc.simulation.routing import new_binder
from entities.orchestrator.transaction import step_events as ev
from schemas.data_plane import MicrobatchNotice
from schemas.step import (
    Adopted,
    Member,
    MicrobatchDispatch,
    MicrobatchState,
    StepDecision,
    StepFenced,
    StepVote,
)
from tests.sim.arithmetic import WRAP, Violation, mix
from tests.sim.following import Following
from workers.routing.next_hop import Binder
from workers.stage.tied_sums import Sends, TiedSums
from workers.transaction.microbatch import Hop

if TYPE_CHECKING:
    from tests.sim.world import World


class Freezing:
    """A process: alive, frozen, or dead. What comes while it is frozen waits for it to wake up."""

    alive = True
    frozen = False

    def __init__(self) -> None:
        self.backlog: list[Callable[[], object]] = []

    def deliver(self, work: Callable[[], object]) -> None:
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


def _binder(world: World, member: Member) -> Binder:
    place = int(re.findall(r"\d+", member.sid)[-1])
    return new_binder("a", place, world.plan.microbatches, lambda: world.now)


class StageNode(StageInstance, Freezing):
    """A stage instance: one number as weights, a dict as sum."""

    def __init__(self, world: World, member: Member, stage: int, epoch: int) -> None:
        def draw() -> float:
            return world.rng.uniform(0.005, 0.03)

        StageInstance.__init__(
            self,
            world,
            member,
            stage=stage,
            last=stage == world.plan.stages - 1,
            cluster="a",
            node="n",
            epoch=epoch,
            binder=_binder(world, member),
            forward=draw,
            backward=draw,
            compute_s=0.0,
            speed=1.0,
        )
        Freezing.__init__(self)
        self.world = world
        self.weights = mix(stage, 1)
        self.sum: dict[int, int] = {}
        self.group: tuple[Member, ...] | None = None
        self.prepared: tuple[int, int, int, int, StepVote] | None = None
        self.tied: TiedSums[int] = TiedSums()
        self._heard: list[ev.Prepare] = []
        self._reduced: tuple[int, int, int] | None = None
        self.sending = 0
        self.loaded_at = 0.0
        self._followings: dict[Member, Following] = {}

    def computed(self, priority: int, hop: Hop, forward_s: float, backward_s: float) -> None:
        def done() -> None:
            if self.machine.current(hop):
                self._compute_numbers(priority, hop)
            StageInstance.computed(self, priority, hop, forward_s, backward_s)

        self.deliver(done)

    def _compute_numbers(self, priority: int, hop: Hop) -> None:
        (value,) = hop.inputs
        gradient = 0
        if priority == FORWARD:
            hop.sent_forward = (mix(value, self.weights),)
        else:
            assert hop.returned is not None
            (gradient,) = hop.returned
        if priority == BACKWARD or self.last:
            if hop.microbatch in self.sum:
                raise Violation(f"{self.member} adds microbatch {hop.microbatch} of step {hop.step} twice")
            self.sum[hop.microbatch] = mix(value, gradient, self.weights, 3)
            hop.sent_backward = (mix(value, gradient, self.weights, 4),)

    # --- orders ---
    def fence(self, effect: ev.Fence) -> StepFenced | None:
        answer = super().fence(effect)
        if answer is None:
            return None
        self.end_following(effect.fenced)
        if self.group is not None and set(self.group) & set(effect.fenced):
            self.release()
        claims = tuple(
            self.world.claim_of(self, hop)
            for hop in self.machine.hops.values()
            if hop.state is MicrobatchState.ACCUMULATED and hop.step == self.machine.version
        )
        return answer.model_copy(update={"claims": claims})

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
        self._reduced = None

    def form(self, order: ev.FormGroup) -> str | None:
        if order.generation < self.generation:
            return "stale"
        self.machine.fence(order.fenced)
        self.end_following(order.fenced)
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

    def vote(self, order: ev.Prepare) -> StepVote | str | None:
        at = (order.step, order.attempt)
        if at != (self.machine.version, self.machine.attempt) or order.generation != self.generation:
            return "conflict"
        if self.group is None:
            return "conflict"
        if order.tied and not any(order is heard for heard in self._heard):
            self._heard = [*self._heard[-8:], order]  # an instance obeys each order once
            receivers = order.receivers(order.members.index(self.member))
            self._send(at, self.tied.ordered((*at, order.generation), receivers))
        if self.prepared is not None and self.prepared[:3] == (*at, order.generation):
            return self.prepared[4]
        total = self.world.reduce(order, self)
        if total is None:
            return None
        others = [stage for stage, _ in order.tied]
        if others:
            if self._reduced != (*at, order.generation):
                self._reduced = (*at, order.generation)
                self._send(at, self.tied.reduced(dict.fromkeys(others, total)))
            came = self.tied.of(*at, others)
            if came is None:
                return None
            total = (total + sum(came.values())) % WRAP
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
            tied=tuple((stage, f"{total:016x}") for stage in others),
        )
        self.prepared = (*at, order.generation, total, vote)
        return vote

    def _send(self, at: tuple[int, int], sends: Sends[int]) -> None:
        for receiver, total in sends:
            self.world.hops.offer_sum(self, receiver, at, total)

    def take_sum(self, notice: MicrobatchNotice, total: int) -> None:
        if (notice.step, notice.attempt) == (self.machine.version, self.machine.attempt):
            self.tied.arrived(notice.step, notice.attempt, notice.stage, total)

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
        self.tied.clear()
        self.sum = {}
        self.applied(decision.step + 1)
        for following in list(self._followings.values()):
            following.applied(decision.step, total)
        return "applied"

    def restart(self, effect: ev.Restart) -> str:
        self.end_following(effect.fenced)
        if effect.attempt > self.machine.attempt:
            self.machine.belongs = True
            self.sum = {}
            self.release()
            self.tied.clear()
        return super().restart(effect)

    def roll_back(self, effect: ev.Restart, version: int) -> str:
        """Forget the open step and take the checkpoint of `version`."""
        self.restart(effect)
        if self.machine.version != version:
            self.weights = self.world.snapshots[self.stage, version]
            self.applied(version)
        return "restored"

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
            fenced=tuple(self.machine.fenced),
        )


class DataNode(DataInstance, Freezing):
    """A data instance."""

    def __init__(self, world: World, member: Member, epoch: int) -> None:
        binder = _binder(world, member)
        DataInstance.__init__(
            self, world, member, cluster="a", node="n", epoch=epoch, binder=binder, make_s=0.0
        )
        Freezing.__init__(self)

    def take(self, order: MicrobatchDispatch) -> str | None:
        if order.epoch != self.machine.epoch:
            return None  # refused
        self.dispatch(order)
        return "ok"

    def roll_back(self, effect: ev.Restart, version: int) -> str:
        return self.restart(effect)

    def adopt(self, epoch: int) -> Adopted | None:
        if epoch < self.machine.epoch:
            return None
        self.machine.epoch = epoch
        return Adopted(
            member=self.member,
            version=self.machine.step,
            attempt=self.machine.attempt,
            generation=-1,
            fenced=tuple(self.machine.fenced),
        )
