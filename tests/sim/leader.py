"""An orchestrator of a simulated job: the real step machine, and a shell that carries its effects out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from entities.orchestrator.transaction.takeover_rules import Settled
from schemas.step import (
    Member,
    StepVote,
)

if TYPE_CHECKING:
    from tests.sim.world import World

JOB = "sim"
RETRY_S = 0.05


class Leader:
    """An orchestrator: the real machine, and a shell that carries its effects out."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.alive = True
        self.frozen = False
        self.lost: set[Member] = set()
        self.machine: StepMachine | None = None
        self.backlog: list[ev.Event] = []
        self.transfers = itertools.count(1)

    def start(self, settled: Settled) -> None:
        plan = self.world.plan
        self.machine = StepMachine(
            job=JOB,
            epoch=self.epoch,
            microbatches=plan.microbatches,
            clip_norm=None,
            stages=settled.stages,
            data=settled.data,
            pauses=lambda step: step >= plan.steps or bool(plan.pause_every and step % plan.pause_every == 0),
            generation=settled.generation,
            transfers=self.transfers,
        )
        self.event(ev.Opened(settled.step, settled.attempt))

    def event(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if self.frozen or self.machine is None:
            self.backlog.append(event)
            return
        if not isinstance(event, ev.Tick):
            self.world.trace(f"E{self.epoch} {event}")
        for effect in self.machine.decide(event, self.world.now):
            self.world.trace(f"E{self.epoch}   → {effect}")
            self.execute(effect)

    def stop(self) -> None:
        self.alive = False

    def lose(self, member: Member) -> None:
        if member not in self.lost:
            self.lost.add(member)
            self.event(ev.IncarnationLost(member))

    def execute(self, effect: ev.Effect) -> None:
        world = self.world
        match effect:
            case ev.Begin(step, attempt):
                world.begin(self, step, attempt)
            case ev.Fence():
                self.order_all(
                    effect.targets,
                    lambda node: node.fence(effect),
                    lambda answers: self.event(ev.FenceAcknowledged(effect.round, tuple(answers.values()))),
                )
            case ev.Assign():
                self.order_all(
                    tuple(effect.paths),
                    lambda node: self._assign(node, effect),
                    lambda answers: self.event(ev.Assigned(effect.round)),
                )
            case ev.FormGroup():
                self.order_all(
                    effect.members,
                    lambda node: node.form(effect),
                    lambda answers: self.event(ev.ReductionGroupFormed(effect.stage, effect.generation)),
                )
                world.after(2.0, lambda: self._group_late(effect))
            case ev.Prepare():
                for member in effect.members:
                    self.order_all(
                        (member,),
                        lambda node: node.prepare(effect),
                        lambda answers: self._prepared(effect, answers),
                    )
            case ev.Record(decision):
                world.record(self, decision)
            case ev.Commit(decision, _):
                members = tuple(member for stage in decision.membership for member in stage)
                self.order_all(
                    members,
                    lambda node: node.commit(decision),
                    lambda answers: self.event(
                        ev.Committed(decision.step, tuple(one for one in members if one not in answers))
                    ),
                    skip_lost=True,
                )
            case ev.Boundary(step):
                if step < world.plan.steps:
                    assert self.machine is not None
                    machine = self.machine
                    pause_s = world.rng.choice((0.02, 0.6))
                    world.after(pause_s, lambda: self.event(ev.Opened(step, machine.attempt)))
                else:
                    world.finished = True
            case ev.SendState():
                world.transfers.order(self, effect)
            case ev.AwaitState():
                world.transfers.await_state(self, effect)
            case ev.Withdraw():
                self.order_all(
                    (effect.source,), lambda node: world.transfers.withdraw(effect), lambda answers: None
                )
            case ev.StageLost(stage, version):
                world.restore(self, stage, version)
            case ev.Condemn(member):
                world.notice_loss(member)
            case ev.Restart():
                world.restarts += 1
                self.order_all(
                    effect.targets,
                    lambda node: node.restart(effect),
                    lambda answers: self.event(ev.Restarted(effect.attempt)),
                    skip_lost=True,
                )
            case ev.RecomputationNoted():
                world.replays += len(effect.replayed)

    def _assign(self, node: Any, effect: ev.Assign) -> str | None:
        machine = node.machine
        if node.stage < 0:
            if machine.attempt <= effect.attempt:
                order = (self.epoch, effect.attempt, effect.round)
                node.run(machine.assign(order, effect.step, effect.paths[node.member]))
        elif (machine.version, machine.attempt) == (effect.step, effect.attempt):
            node.run(machine.assign((self.epoch, effect.attempt, effect.round), effect.paths[node.member]))
        return "ok"

    def _prepared(self, effect: ev.Prepare, answers: dict[Member, Any]) -> None:
        for answer in answers.values():
            if isinstance(answer, StepVote):
                self.event(ev.Voted(effect.stage, answer))
            else:
                self.event(ev.ReductionGroupFailed(effect.stage, effect.generation))

    def _group_late(self, effect: ev.FormGroup) -> None:
        machine = self.machine
        if machine is None or machine.is_formed(effect.stage):
            return
        if machine.generations[effect.stage] == effect.generation:
            self.event(ev.ReductionGroupFailed(effect.stage, effect.generation))

    def order_all(
        self,
        members: Sequence[Member],
        handle: Callable[[Any], Any],
        done: Callable[[dict[Member, Any]], None],
        *,
        skip_lost: bool = False,
    ) -> None:
        """Repeats an order at each member until it answers or is lost; `done` once that holds for all."""
        answers: dict[Member, Any] = {}
        over = False

        def finish() -> None:
            nonlocal over
            open_ = [member for member in members if member not in answers and member not in self.lost]
            if over or open_ or (not skip_lost and any(member not in answers for member in members)):
                return
            over = True
            done(answers)

        def ask(member: Member) -> None:
            if over or not self.alive or member in answers:
                return
            if member in self.lost:
                finish()
                return
            if not self.frozen:
                node = self.world.nodes[member]
                self.world.message(lambda: node.deliver(lambda: obey(member, node)))
            self.world.after(RETRY_S, lambda: ask(member))

        def obey(member: Member, node: Any) -> None:
            if node.machine.epoch > self.epoch:
                self.world.message(self.stop)  # refused: another orchestrator leads
            else:
                answer(member, handle(node))

        def answer(member: Member, reply: Any) -> None:
            if reply is not None:
                self.world.message(lambda: heard(member, reply))

        def heard(member: Member, reply: Any) -> None:
            if self.alive and not self.frozen and member not in answers:
                answers[member] = reply
                finish()

        for member in members:
            ask(member)
        finish()
