"""What a simulated source sends to a newcomer that follows it: `workers.stage.followers` in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tests.sim.hops import notice
from workers.links.redo_queue import RedoQueue
from workers.stage.followers import OVERFLOWS

if TYPE_CHECKING:
    from tests.sim.nodes import StageNode
    from tests.sim.world import World


class Following:
    """What one source sends to one newcomer that follows it."""

    def __init__(self, world: World, source: StageNode, target: StageNode, transfer: int) -> None:
        self._world = world
        self._source = source
        self._target = target
        self.transfer = transfer
        self._queue: RedoQueue[int] = RedoQueue()
        self._busy = False
        self.failed = False
        self._pump()

    @property
    def slow(self) -> bool:
        return self._queue.overflows >= OVERFLOWS

    @property
    def over(self) -> bool:
        return self.failed or self.slow

    @property
    def version(self) -> int:
        """What the newcomer was brought to, once one redo at most is on its way; else −1."""
        reached = self._queue.reached
        return -1 if self._queue.due or reached is None else reached

    def applied(self, step: int, total: int) -> None:
        if not self.over:
            if self._queue.reached is None:
                self._world.transfers.seen["steps beside a snapshot"] += 1
            self._queue.applied(step, total)
            self._pump()

    def end(self) -> None:
        self.failed = True

    def _pump(self) -> None:
        if self.over or self._busy or not self._queue.due:
            return
        self._busy = True
        redo = self._queue.next()
        if redo is None:
            self._later(0.02, self._snapshot)
        else:
            step, total = redo
            self._send("redo", step, total, lambda: self._queue.brought_to(step + 1, redo=True))

    def _snapshot(self) -> None:
        version, weights = self._source.machine.version, self._source.weights
        self._queue.taken(version)
        self._send("state", version, weights, lambda: self._queue.brought_to(version))

    def _later(self, most_s: float, work: Callable[[], None]) -> None:
        """At the source: not while it is frozen, and never once it is dead."""
        self._world.after(self._world.rng.uniform(0.0005, most_s), lambda: self._source.deliver(work))

    def _send(
        self, direction: Literal["state", "redo"], step: int, value: int, arrived: Callable[[], None]
    ) -> None:
        world, source, target = self._world, self._source, self._target
        offered = notice(source, target.member, source.stage, (step, 0, 0), direction, transfer=self.transfer)
        takes_s = world.rng.uniform(*(world.plan.state_s if direction == "state" else world.plan.redo_s))
        answered = False

        def offer() -> None:
            if answered or self.over:
                return
            world.message(lambda: target.deliver(heard))
            self._later(world.plan.retry_s, offer)

        def heard() -> None:
            nonlocal answered
            if answered:
                return
            answer = target.machine.offered(offered)
            if answer == "accepted":
                answered = True
                world.after(takes_s, land)
            elif answer == "stale":
                answered = True
                self._later(0.01, self.end)

        def land() -> None:
            if source.alive or world.rng.random() < 0.5:  # it may be all on the wire when its sender dies
                world.after(world.rng.uniform(0.0, 0.003), lambda: target.deliver(take))
            if target.alive and not target.frozen:
                self._later(0.004, received)

        def take() -> None:
            world.transfers.take(target, offered, value)

        def received() -> None:
            self._busy = False
            if not self.over:
                arrived()
                self._pump()

        offer()
