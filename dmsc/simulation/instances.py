"""Simulated instances: the real machines of `workers/`, with virtual waiting in place of compute."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from dmsc.simulation.kernel import Kernel
from dmsc.simulation.messages import SimulatedLoad
from dmsc.simulation.scenarios.service_times import Draw
from entities.orchestrator.transaction import step_events as ev
from schemas.data_plane import MicrobatchNotice, RouteTable
from schemas.step import Member, MicrobatchDispatch, StepDecision, StepFenced
from schemas.telemetry import LinkSample
from workers.routing.next_hop import Binder
from workers.telemetry.load import ComputeLoad
from workers.transaction import data_machine, stage_machine
from workers.transaction.data_machine import DataMachine
from workers.transaction.microbatch import Hop
from workers.transaction.stage_machine import Backward, Forward, Offer, StageMachine

BACKWARD, FORWARD = 1, 2
"""Priorities as in `workers.compute.compute_thread.Priority`. Backward work goes first, which yields 1F1B."""


class Surroundings(Protocol):
    """What an instance needs from its job: it delivers offers and takes claims."""

    kernel: Kernel

    def offer(self, sender: StageInstance, hop: Hop, to: Member, direction: str) -> None: ...
    def offer_data(self, sender: DataInstance, send: data_machine.Send) -> None: ...
    def claim(self, instance: StageInstance, hop: Hop) -> None: ...


class SimulatedInstance(ABC):
    """What stage and data instances have in common: their place, whether they live, and their messages."""

    machine: StageMachine | DataMachine

    def __init__(
        self, job: Surroundings, member: Member, stage: int, cluster: str, node: str, binder: Binder
    ) -> None:
        self.job = job
        self.member = member
        self.stage = stage
        self.cluster = cluster
        self.node = node
        self.alive = True
        self.binder = binder
        self.transfers = 0
        self.transfer_s = 0.0

    def take_links(self) -> tuple[LinkSample, ...]:
        """The transfers to this instance since the last call, as one link."""
        if not self.transfers:
            return ()
        sample = LinkSample(peer="any", transfers=self.transfers, transfer_ms=1e3 * self.transfer_s)
        self.transfers, self.transfer_s = 0, 0.0
        return (sample,)

    @abstractmethod
    def routed(self, table: RouteTable) -> None:
        """Use a new table; waiting microbatches may now have a next hop."""

    @abstractmethod
    def fence(self, effect: ev.Fence) -> StepFenced | None:
        """Fence the lost, and say what is held. None: this instance has not got to the step yet."""

    @abstractmethod
    def assign(self, effect: ev.Assign) -> str:
        """Take over the paths that others left."""

    @abstractmethod
    def restart(self, effect: ev.Restart) -> str:
        """Forget the attempts of the step below this one."""

    @abstractmethod
    def arrived(self, notice: MicrobatchNotice) -> None:
        """Handle an offer that has arrived, together with its tensor."""


class StageInstance(SimulatedInstance):
    """A replica of a stage: one compute thread with a queue, backward before forward."""

    def __init__(
        self,
        job: Surroundings,
        member: Member,
        *,
        stage: int,
        last: bool,
        cluster: str,
        node: str,
        epoch: int,
        binder: Binder,
        forward: Draw,
        backward: Draw,
        compute_s: float,
        speed: float,
    ) -> None:
        super().__init__(job, member, stage, cluster, node, binder)
        self.machine: StageMachine = StageMachine(
            member, epoch=epoch, stage=stage, last=last, binder=self.binder
        )
        self.last = last
        self.speed = self.planned_speed = speed
        self.summed: list[int] = []
        self.generation = -1
        self.busy_s = 0.0
        self.measured = ComputeLoad()
        self._service_ms = 0.0
        self._forward = forward
        self._backward = backward
        self._compute_s = compute_s
        self._queue: list[tuple[int, int, Hop]] = []
        self._queued = 0
        self._computing = False
        self._waiting: list[MicrobatchNotice] = []

    @property
    def queue(self) -> int:
        """The number of microbatches that wait for the compute thread."""
        return len(self._queue)

    def load(self) -> SimulatedLoad:
        """The load that the instance reports with its messages."""
        return SimulatedLoad(self.machine.open, self._service_ms)

    def routed(self, table: RouteTable) -> None:
        self.binder.update(table)
        self.run(self.machine.bind())

    def arrived(self, notice: MicrobatchNotice) -> None:
        machine = self.machine
        answer = machine.offered(notice)
        if answer == "accepted":
            self.run(machine.arrived(notice, ()))
        elif answer == "later":
            self._waiting.append(notice)  # offered again until it is accepted

    def reconsider(self) -> None:
        """Offer postponed notices again, because the step, the attempt or a path has changed."""
        waiting, self._waiting = self._waiting, []
        for notice in waiting:
            self.arrived(notice)

    def run(self, effects: Iterable[stage_machine.Effect]) -> None:
        """Carry out the machine's effects."""
        for effect in effects:
            if type(effect) is Offer:  # `match` takes five times as long, and there are millions of effects
                self.job.offer(self, effect.hop, effect.to, effect.direction)
            elif type(effect) is Forward:
                self._submit(FORWARD, effect.hop)
            elif type(effect) is Backward:
                self._submit(BACKWARD, effect.hop)
            else:
                self.job.claim(self, effect.hop)

    # --- orders -------------------------------------------------------------------------------------------
    def fence(self, effect: ev.Fence) -> StepFenced | None:
        machine = self.machine
        if (machine.version, machine.attempt) != (effect.step, effect.attempt):
            return None
        machine.fence(effect.fenced)
        held = machine.answer_round((machine.epoch, effect.attempt, effect.round))
        return StepFenced(member=self.member, version=machine.version, round=effect.round, held=held)

    def assign(self, effect: ev.Assign) -> str:
        machine = self.machine
        if (machine.version, machine.attempt) == (effect.step, effect.attempt):
            order = (machine.epoch, effect.attempt, effect.round)
            self.run(machine.assign(order, effect.paths[self.member]))
            self.reconsider()
        return "assigned"

    def form(self, effect: ev.FormGroup) -> str | None:
        """Stand together with the others of the group. A subclass may return None: not all are there yet."""
        self.machine.fence(effect.fenced)
        if effect.attempt > self.machine.attempt:
            self.restarted(effect.attempt)
        self.generation = effect.generation
        return "formed"

    def commit(self, decision: StepDecision) -> str | None:
        if self.machine.version == decision.step:
            self.applied(decision.step + 1)
        return "applied"

    def restart(self, effect: ev.Restart) -> str:
        self.machine.fence(effect.fenced)
        if effect.attempt > self.machine.attempt:
            self.restarted(effect.attempt)
        return "restarted"

    # --- steps --------------------------------------------------------------------------------------------
    def applied(self, version: int) -> None:
        """Apply a committed step."""
        self.summed = []
        effects = self.machine.applied(version)
        if effects:
            self.run(effects)
        if self._waiting:
            self.reconsider()

    def restarted(self, attempt: int) -> None:
        """Begin the step again."""
        self._queue.clear()
        self.summed = []
        self.machine.restarted(attempt)
        self.reconsider()

    def _submit(self, priority: int, hop: Hop) -> None:
        if self._computing:
            self._queued += 1
            heapq.heappush(self._queue, (priority, self._queued, hop))
        else:
            self._compute(priority, hop)

    def _next(self) -> None:
        while self._queue:
            priority, _, hop = heapq.heappop(self._queue)
            if self.machine.current(hop):
                self._compute(priority, hop)
                return

    def _compute(self, priority: int, hop: Hop) -> None:
        forward_s = backward_s = 0.0
        if priority == FORWARD:
            forward_s = self._forward() / self.speed + self._compute_s
        if priority == BACKWARD or self.last:
            backward_s = self._backward() / self.speed + self._compute_s
        self._computing = True
        self.job.kernel.after(forward_s + backward_s, self.computed, priority, hop, forward_s, backward_s)

    def computed(self, priority: int, hop: Hop, forward_s: float, backward_s: float) -> None:
        """The compute thread has finished this microbatch's work."""
        self._computing = False
        if not self.alive:
            return
        self.busy_s += forward_s + backward_s
        machine = self.machine
        if machine.current(hop):
            if forward_s:
                hop.forward_ms = 1e3 * forward_s
            if priority == BACKWARD or self.last:
                self.summed.append(hop.microbatch)
                self.measured.measured(hop.forward_ms, 1e3 * backward_s)
                self._service_ms = self.measured.service_ms
            self.run(machine.forwarded(hop) if priority == FORWARD else machine.accumulated(hop))
        if self._queue and not self._computing:
            self._next()


class DataInstance(SimulatedInstance):
    """A data instance: it makes microbatches one after the other, in `make_s` each."""

    def __init__(
        self,
        job: Surroundings,
        member: Member,
        *,
        cluster: str,
        node: str,
        epoch: int,
        binder: Binder,
        make_s: float,
    ) -> None:
        super().__init__(job, member, -1, cluster, node, binder)
        self.machine: DataMachine = DataMachine(member, epoch=epoch, binder=self.binder)
        self._make_s = make_s
        self._free_at = 0.0

    def routed(self, table: RouteTable) -> None:
        self.binder.update(table)
        self.run(self.machine.bind())

    def dispatch(self, order: MicrobatchDispatch) -> None:
        self.run(self.machine.dispatch(order))

    def fence(self, effect: ev.Fence) -> StepFenced | None:
        machine = self.machine
        self.run(machine.fence(effect.fenced))
        held = machine.answer_round(effect.step, (machine.epoch, effect.attempt, effect.round))
        return StepFenced(member=self.member, version=effect.step, round=effect.round, held=held)

    def assign(self, effect: ev.Assign) -> str:
        machine = self.machine
        if machine.attempt <= effect.attempt:
            order = (machine.epoch, effect.attempt, effect.round)
            self.run(machine.assign(order, effect.step, effect.paths[self.member]))
        return "assigned"

    def restart(self, effect: ev.Restart) -> str:
        self.run(self.machine.fence(effect.fenced))
        if effect.attempt > self.machine.attempt:
            self.machine.restarted(effect.attempt)
        return "restarted"

    def run(self, sends: Iterable[data_machine.Send]) -> None:
        """Make the microbatches to send, and send them."""
        kernel = self.job.kernel
        for send in sends:
            self._free_at = max(self._free_at, kernel.now) + self._make_s
            kernel.after(self._free_at - kernel.now, self._made, send)

    def arrived(self, notice: MicrobatchNotice) -> None:
        if self.machine.offered(notice) == "accepted":
            self.run(self.machine.arrived(notice))

    def _made(self, send: data_machine.Send) -> None:
        if self.alive and self.machine.current(send.work, send.to):
            self.job.offer_data(self, send)
