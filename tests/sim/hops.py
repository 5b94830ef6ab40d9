"""Microbatches on their way between simulated instances: notices, answers, tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schemas.data_plane import MicrobatchNotice
from schemas.step import (
    Member,
)
from tests.sim.arithmetic import mix
from tests.sim.leader import JOB
from workers.transaction.data_machine import Send
from workers.transaction.microbatch import Hop

if TYPE_CHECKING:
    from tests.sim.nodes import DataNode, StageNode
    from tests.sim.world import World


def notice(
    sender: Any, to: Member, stage: int, work: tuple[int, int, int], direction: str, **more: int
) -> MicrobatchNotice:
    step, attempt, number = work
    return MicrobatchNotice(
        job=JOB,
        epoch=sender.machine.epoch,
        step=step,
        attempt=attempt,
        microbatch=number,
        stage=stage,
        direction=direction,
        sender=sender.member,
        receiver=to,
        link="l",
        tag=0,
        tensors=(),
        **more,
    )


class Hops:
    """Notices are repeated until they are answered, as `HopExchange` does."""

    def __init__(self, world: World) -> None:
        self._world = world

    def offer(self, node: StageNode, hop: Hop, to: Member, direction: str) -> None:
        payload = hop.sent_forward if direction == "forward" else hop.sent_backward
        stage = node.stage + (1 if direction == "forward" else -1)
        work = (hop.step, hop.attempt, hop.microbatch)

        def is_current() -> bool:
            return node.alive and node.machine.current(hop)

        self._offer(node, to, self._of_round(node, to, stage, work, direction), payload, is_current)

    def offer_data(self, node: DataNode, send: Send) -> None:
        step, attempt, number, _ = send.work

        def is_current() -> bool:
            return node.alive and node.machine.current(send.work, send.to)

        offered = self._of_round(node, send.to, 0, (step, attempt, number), "forward")
        self._offer(node, send.to, offered, (mix(step, number),), is_current)

    def offer_sum(self, node: StageNode, to: Member, at: tuple[int, int], total: int) -> None:
        """The sum of what a tied stage shares."""

        def is_current() -> bool:
            return node.alive and (node.machine.version, node.machine.attempt) == at

        self._offer(node, to, notice(node, to, node.stage, (*at, 0), "tied"), total, is_current)

    def _of_round(self, node: Any, to: Member, stage: int, work: tuple[int, int, int], direction: str) -> Any:
        number = node.machine.snapshot.round(node.machine.epoch, *work[:2])
        return notice(node, to, stage, work, direction, round=number)

    def _offer(
        self, node: Any, to: Member, offered: MicrobatchNotice, payload: Any, is_current: Callable[[], bool]
    ) -> None:
        """Notices are repeated until answered; then the tensors travel, unless an end dies."""
        target = self._world.nodes[to]
        answered = False

        def repeat() -> None:
            if answered or not is_current() or to in node.machine.fenced:
                return
            if frozenset({node.member, to}) in self._world.cut:
                self._world.after(0.1, lambda: self._cut_reported(node.member, to))
                return
            if not node.frozen:
                self._world.message(lambda: target.deliver(heard))
            self._world.after(self._world.plan.retry_s, repeat)

        def heard() -> None:
            nonlocal answered
            if answered or node.member in target.machine.fenced:
                return
            answer = target.machine.offered(offered)
            if answer == "later":
                return
            answered = True
            if answer == "accepted":
                self._world.after(self._world.rng.uniform(0.001, 0.02), arrive)

        def arrive() -> None:
            if not node.alive:
                return
            target.deliver(land)

        def land() -> None:
            if node.member in target.machine.fenced:
                return
            if offered.direction == "tied":
                target.take_sum(offered, payload)
            elif target.stage < 0:
                target.run(target.machine.arrived(offered))
            else:
                target.run(target.machine.arrived(offered, payload))

        repeat()

    def _cut_reported(self, one: Member, other: Member) -> None:
        """Both live, but can't reach each other: the orchestrator fences one of them whole."""
        if one in self._world.handled or other in self._world.handled:
            return
        self._world.notice_loss(other)
