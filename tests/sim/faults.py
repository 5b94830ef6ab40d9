"""What befalls a simulated job: kills, freezes, cut links, takeovers of the orchestrator, and roll-backs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.takeover_rules import ResumePoint, find_resume_point
from schemas.step import (
    Adopted,
    Member,
    Phase,
    StepDecision,
)
from tests.sim.leader import Leader

if TYPE_CHECKING:
    from tests.sim.world import World


class Faults:
    """Strikes as often as the plan says, at moments of the seed's choice."""

    def __init__(self, world: World) -> None:
        self._world = world

    def schedule(self) -> None:
        plan, rng = self._world.plan, self._world.rng
        horizon = 0.15 * plan.steps
        for kind, count in (
            ("kill", plan.kills),
            ("freeze", plan.freezes),
            ("cut", plan.cuts),
            ("takeover", plan.takeovers),
            ("join", plan.joins),
            ("roll back", plan.rollbacks),
            ("layout", plan.layouts),
        ):
            for _ in range(count):
                self._world.after(rng.uniform(0.0, horizon), lambda kind=kind: self._fault(kind))

    def _living(self) -> list[Any]:
        return [node for node in self._world.nodes.values() if node.alive and not node.frozen]

    def _fault(self, kind: str) -> None:
        world = self._world
        if world.finished:
            return
        if kind == "takeover":
            self._take_over()
            return
        if kind == "join":
            world.fired.append("join")
            world.join(world.leader)
            return
        if kind == "roll back":
            self._roll_back()
            return
        if kind == "layout":
            world.fired.append("layout")
            world.leader.event(ev.Relaid(world.rng.randrange(world.plan.stages)))
            return
        node = world.rng.choice(self._living())
        world.fired.append(f"{kind} {node.member.sid}")
        world.trace(f"FAULT {kind} {node.member}")
        if kind == "kill":
            node.alive = False
            world.after(world.rng.uniform(0.001, 0.3), lambda: world.notice_loss(node.member))
        elif kind == "freeze":
            node.frozen = True
            if world.rng.random() < 0.7:
                world.after(world.rng.uniform(0.05, 0.4), lambda: world.notice_loss(node.member))
            world.after(world.rng.uniform(0.02, 1.5), node.thaw)
        elif kind == "cut":
            other = world.rng.choice([one for one in self._living() if one is not node] or [node])
            world.cut.add(frozenset({node.member, other.member}))

    def _take_over(self) -> None:
        """The leader dies, or freezes and wakes up later; another one adopts what lives."""
        old = self._world.leader
        if not old.started:
            return
        self._world.fired.append("takeover")
        self._world.trace("FAULT takeover")
        if self._world.rng.random() < 0.5:
            old.alive = False
        else:
            old.frozen = True

            def wake() -> None:
                old.frozen = False
                backlog, old.backlog = old.backlog, []
                for event in backlog:
                    old.event(event)

            self._world.after(self._world.rng.uniform(0.05, 1.0), wake)
        new = self._world.leader = Leader(self._world, next(self._world.epochs))
        new.lost = set(self._world.handled)
        self._world.after(self._world.rng.uniform(0.02, 0.5), lambda: self._adopt(new))

    def _adopt(self, new: Leader) -> None:
        self._world.record_epoch = new.epoch
        decision = self._world.recorded
        members = [member for member in self._world.nodes if member not in self._world.handled]
        newest = {member.sid: member for member in members}
        targets = tuple(member for member in members if newest[member.sid] == member)

        def adopted(answers: dict[Member, Adopted]) -> None:
            roles = {member: self._world.nodes[member].stage for member in targets}
            resume_point = find_resume_point(
                decision, tuple(answers.values()), roles, self._world.plan.stages
            )
            for member in targets:
                if member not in resume_point.everyone and member not in new.lost:
                    new.lost.add(member)
            self._recommit(new, resume_point, decision)

        new.order_all(targets, lambda node: node.adopt(new.epoch), adopted, skip_lost=True)

    def _recommit(self, new: Leader, resume_point: ResumePoint, decision: StepDecision | None) -> None:
        def abort(_: Any) -> None:
            effect = ev.Restart(resume_point.attempt, tuple(sorted(new.lost, key=str)), (), "takeover")
            living = tuple(member for member in resume_point.everyone if member not in new.lost)
            new.order_all(living, lambda node: node.restart(effect), lambda _: begin(), skip_lost=True)

        def begin() -> None:
            new.start(resume_point)
            for member in sorted(new.lost, key=str):
                new.event(ev.IncarnationLost(member))
                if self._world.nodes[member].member in newest_lost:
                    self._world.replace(new, member)
            backlog, new.backlog = new.backlog, []
            for event in backlog:
                new.event(event)

        present = {member.sid for member in resume_point.everyone}
        newest_lost = {member for member in new.lost if member.sid not in present}
        if resume_point.recommit and decision is not None:
            order = decision.model_copy(update={"epoch": new.epoch})
            new.order_all(resume_point.recommit, lambda node: node.commit(order), abort, skip_lost=True)
        else:
            abort(None)

    def _roll_back(self) -> None:
        """All living members take an earlier version, where a new loop of the same orchestrator begins."""
        world, old = self._world, self._world.leader
        if not old.started or not old.alive or old.machine.phase is not Phase.GATHERING:
            world.after(0.05, lambda: self._fault("roll back"))
            return
        machine = old.machine
        version = world.rng.randrange(machine.step + 1)
        world.fired.append(f"roll back to {version}")
        world.trace(f"FAULT roll back from step {machine.step} to {version}")
        old.alive = False
        new = world.leader = Leader(world, old.epoch)
        new.lost, new.transfers = set(world.handled), old.transfers
        attempt, generation = machine.attempt + 1, max(machine.generations) + 1

        def restore() -> None:
            lost = tuple(sorted(new.lost, key=str))
            effect = ev.Restart(attempt, lost, (), "roll back")
            members = [
                member
                for stage in (*machine.stages, machine.data)
                for member in stage
                if member not in new.lost
            ]
            new.order_all(
                members,
                lambda node: node.roll_back(effect, version),
                lambda answers: open_loop(answers) if len(answers) == len(members) else restore(),
                skip_lost=True,
            )

        def open_loop(crew: Collection[Member]) -> None:
            new.start(
                ResumePoint(
                    step=version,
                    attempt=attempt,
                    generation=generation,
                    stages=[[member for member in stage if member in crew] for stage in machine.stages],
                    data=[member for member in machine.data if member in crew],
                )
            )
            backlog, new.backlog = new.backlog, []
            for member in sorted(new.lost, key=str):
                new.event(ev.IncarnationLost(member))
            for event in backlog:
                new.event(event)
            for member in [member for member in world.nodes if member not in crew]:
                world.notice_loss(member)  # a newcomer that was under way begins anew
            newest = {member.sid: member for member in world.nodes}
            for member in [member for member in newest.values() if member in new.lost]:
                world.replace(new, member)

        restore()
