"""An orchestrator of a simulated job: the real step machine, and a shell that carries its effects out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dmsc.simulation.leader import Answers, SimulatedLeader
from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.step import (
    Member,
    StepVote,
)

if TYPE_CHECKING:
    from tests.sim.world import World

JOB = "sim"


class Leader(SimulatedLeader):
    """Orders are repeated until they are answered, as `Bus.command` does."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.alive = True
        self.frozen = False
        self.started = False
        self.lost: set[Member] = set()
        self.backlog: list[ev.Event] = []
        self.transfers = itertools.count(1)

    def start(self, resume_point: ResumePoint) -> None:
        plan = self.world.plan
        self.machine = StepMachine(
            job=JOB,
            epoch=self.epoch,
            microbatches=plan.microbatches,
            clip_norm=None,
            stages=resume_point.stages,
            data=resume_point.data,
            pauses=lambda step: step >= plan.steps or bool(plan.pause_every and step % plan.pause_every == 0),
            step=resume_point.step,
            attempt=resume_point.attempt,
            generation=resume_point.generation,
            transfers=self.transfers,
            tied=plan.tied,
        )
        self.started = True
        self.event(ev.Opened(resume_point.step, resume_point.attempt))

    def event(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if self.frozen or not self.started:
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
        super().execute(effect)
        if isinstance(effect, ev.FormGroup):
            self.world.after(2.0, lambda: self._group_late(effect))
        self.world.restarts += isinstance(effect, ev.Restart)

    def order(
        self,
        effect: ev.Effect,
        members: Sequence[Member],
        obey: Callable[[Any], Any],
        done: Callable[[Answers], None],
        *,
        skip_lost: bool = False,
    ) -> None:
        self.order_all(members, obey, done, skip_lost=skip_lost)

    def carry_out(self, effect: ev.Effect) -> None:
        world = self.world
        match effect:
            case ev.Begin(step, attempt):
                world.begin(self, step, attempt)
            case ev.Prepare():
                for member in effect.members:
                    self.order_all(
                        (member,),
                        lambda node: node.vote(effect),
                        lambda answers: self._prepared(effect, answers),
                    )
            case ev.Record(decision):
                world.record(self, decision)
            case ev.Boundary(step) if step < world.plan.steps:
                pause_s = world.rng.choice((0.02, 0.6))
                world.after(pause_s, lambda: self.event(ev.Opened(step, self.machine.attempt)))
            case ev.Boundary():
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
            case ev.RecomputationNoted():
                world.replays += len(effect.replayed)

    def _prepared(self, effect: ev.Prepare, answers: Answers) -> None:
        for answer in answers.values():
            if isinstance(answer, StepVote):
                self.event(ev.Voted(effect.stage, answer))
            else:
                self.event(ev.ReductionGroupFailed(effect.stage, effect.generation))

    def _group_late(self, effect: ev.FormGroup) -> None:
        machine = self.machine
        if not machine.is_formed(effect.stage) and machine.generations[effect.stage] == effect.generation:
            self.event(ev.ReductionGroupFailed(effect.stage, effect.generation))

    def order_all(
        self,
        members: Sequence[Member],
        handle: Callable[[Any], Any],
        done: Callable[[Answers], None],
        *,
        skip_lost: bool = False,
    ) -> None:
        """Repeats an order at each member until it answers or is lost; `done` once that holds for all."""
        answers: Answers = {}
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
            self.world.after(self.world.plan.retry_s, lambda: ask(member))

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
