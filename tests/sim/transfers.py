"""States on their way to newcomers: they follow, by a snapshot and redos, or get the state while all waits.

The queues and the decisions are the real ones (`workers.links.redo_queue`, `StageMachine.takes`). What
is between them, `workers.stage.followers`, `HopExchange` and `StageState`, is modelled: notices are repeated
until answered, receipts may be there before what they tell of, and what was accepted is taken over one after
the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from entities.orchestrator.transaction import step_events as ev
from schemas.data_plane import MicrobatchNotice
from schemas.step import Member
from tests.sim.arithmetic import Violation
from tests.sim.hops import notice

if TYPE_CHECKING:
    from tests.sim.leader import Leader
    from tests.sim.nodes import StageNode
    from tests.sim.world import World


class Transfers:
    """All of a world, and what became of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: Counter[str] = Counter()
        self._sendings: dict[tuple[Member, Member], Callable[[], None]] = {}  # to the dead, while all waits

    # --- at the newcomer ------------------------------------------------------------------------------
    def take(
        self,
        target: StageNode,
        notice: MicrobatchNotice,
        value: int,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Taken over in the order in which it came, when its turn comes."""
        if notice.direction == "state" and not target.machine.takes(notice):
            return

        def load() -> None:
            if target.machine.takes(notice) and (
                notice.direction == "state" or notice.step == target.machine.version
            ):
                self._load(target, notice, value)
            done()

        at = max(target.loaded_at, self._world.now) + self._world.rng.uniform(0.0005, 0.01)
        target.loaded_at = at
        self._world.after(at - self._world.now, lambda: target.deliver(load))

    def _load(self, target: StageNode, notice: MicrobatchNotice, value: int) -> None:
        if notice.direction == "state":
            target.weights = value
            target.run(target.machine.applied(notice.step))
        else:
            target.redo(notice.step, value)
            self.seen["redos"] += 1
        if target.weights != self._world.snapshots[target.stage, target.machine.version]:
            raise Violation(f"{target.member} takes over other weights of version {target.machine.version}")

    # --- orders ---------------------------------------------------------------------------------------
    def order(self, leader: Leader, effect: ev.SendState) -> None:
        if effect.follow:
            self._follow(leader, effect)
        else:
            self.seen["held"] += 1
            self._send_state(leader, effect)

    def _follow(self, leader: Leader, effect: ev.SendState) -> None:
        target = self._world.nodes[effect.to]

        def handle(source: StageNode) -> tuple[str, int] | None:
            if effect.to in source.machine.fenced:
                return "failed", -1
            following = source.follow(target, effect.transfer)
            if following is None or following.failed:
                return "failed", -1
            if following.slow:
                return "slow", -1
            return ("there", following.version) if following.version >= 0 else None

        def heard(answers: dict[Member, tuple[str, int]]) -> None:
            what, version = answers.get(effect.source, ("failed", -1))
            if what == "failed":
                self.join_failed(leader, effect.to, effect.transfer)
                return
            self.seen[what] += 1
            leader.event(ev.Followed(effect.to, effect.transfer, version, what == "slow"))

        leader.order_all((effect.source,), handle, heard, skip_lost=True)

    def await_state(self, leader: Leader, effect: ev.AwaitState) -> None:
        over = False

        def handle(node: StageNode) -> str | None:
            return "there" if node.machine.version == effect.version and not over else None

        def heard(answers: dict[Member, str]) -> None:
            nonlocal over
            if over:
                return
            over = True
            if effect.to in answers:
                self.seen["last redo"] += 1
                leader.event(ev.Joined(effect.to, effect.transfer, effect.version))
            else:
                self.join_failed(leader, effect.to, effect.transfer)

        leader.order_all((effect.to,), handle, heard, skip_lost=True)
        self._world.after(self._world.plan.last_redo_s, lambda: heard({}))

    def join_failed(self, leader: Leader, to: Member, transfer: int) -> None:
        """As `StepOrders` does."""
        if not leader.started or not leader.alive:
            return
        machine = leader.machine
        given_up = machine.transfer_of(to) != transfer
        stage = machine.stage_of(to)
        leader.event(ev.JoinFailed(to, transfer))
        if stage is not None and not given_up:
            self._world.after(self._world.plan.again_s, lambda: self._again(leader, to, stage))

    def _again(self, leader: Leader, to: Member, stage: int) -> None:
        if to not in leader.lost:
            leader.event(ev.NewcomerReady(to, stage))

    def withdraw(self, effect: ev.Withdraw) -> str:
        source = self._world.nodes[effect.source]
        source.end_following([effect.newcomer])
        give_up = self._sendings.get((effect.source, effect.newcomer))
        if give_up is not None:
            give_up()
        return "withdrawn"

    def _send_state(self, leader: Leader, effect: ev.SendState) -> None:
        """As it is, while the source applies nothing."""
        world = self._world
        source, target = world.nodes[effect.source], world.nodes[effect.to]
        state: dict[str, int] = {}

        def fail() -> None:
            self.join_failed(leader, effect.to, effect.transfer)

        def begin() -> None:
            if source.machine.epoch > leader.epoch:
                leader.stop()
                return
            if source.machine.version != effect.version:
                fail()
                return
            source.end_following([effect.to])
            source.sending += 1
            state["weights"] = source.weights
            world.after(world.rng.uniform(*world.plan.state_s), finish)

        def give_up() -> None:
            if self._sendings.pop((effect.source, effect.to), None) is not None:
                source.sending -= 1
                world.after(0.3, fail)

        def finish() -> None:
            if not target.alive and source.alive and not source.frozen:
                # it goes on trying to reach the dead until it is told, or has tried long enough
                self._sendings[effect.source, effect.to] = give_up
                world.after(world.plan.unreachable_s, give_up)
                return
            source.sending -= 1
            if not (source.alive and target.alive) or source.frozen or target.frozen:
                world.after(0.3, fail)
                return
            offered = notice(
                source, effect.to, source.stage, (effect.version, 0, 0), "state", transfer=effect.transfer
            )
            if target.machine.offered(offered) != "accepted":
                fail()
                return
            if state["weights"] != source.weights:
                raise Violation(f"{source.member} changed its weights while it sent them")
            self.take(target, offered, state["weights"], joined)

        def joined() -> None:
            leader.event(ev.Joined(effect.to, effect.transfer, effect.version))

        if source.alive and not source.frozen and target.alive:
            world.after(0.005, begin)
        else:
            world.after(0.3, fail)
