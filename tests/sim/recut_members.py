"""The members of a simulated job that is cut anew: real layers, and the real code of their part in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schemas.errors import PeerUnreachable
from schemas.step import Member, StepAbort
from schemas.task_graph import TaskGraph
from tests.builders import graphs
from workers.compute.stage_compute import StageCompute
from workers.stage.layer_change import LayerChange, LayerChangeTimes
from workers.state.layer_state import layer_state, load_layers

if TYPE_CHECKING:
    from tests.sim.recuts import RecutWorld

LAYERS = 6
CPU = torch.device("cpu")


class SimThread:
    """Tasks one after the other, each some turns later."""

    def __init__(self, turns: Callable[[], Any]) -> None:
        self._turns = turns
        self._last: asyncio.Future[Any] | None = None

    def order(self, task: Callable[[], Any]) -> asyncio.Future[Any]:
        before = self._last

        async def run() -> Any:
            if before is not None:
                await asyncio.wait([before])
            await self._turns()
            return task()

        self._last = asyncio.ensure_future(run())
        return self._last

    async def beside(self, task: Callable[[], Any], patience_s: float) -> tuple[Any, float]:
        return await self.order(task), 0.0


class SimMember:
    """One incarnation: its layers, and its part in re-cuts. `epoch`: of the leader that it obeys."""

    def __init__(self, world: RecutWorld, member: Member, graph: TaskGraph) -> None:
        self.member, self.alive, self.epoch, self.attempt = member, True, world.epoch, world.attempt
        self._world = world
        started = graphs.start(
            graph.unit(member.sid), spec=world.spec, stages=len(graph.cuts), layer_count=LAYERS
        ).model_copy(update={"incarnation": member.incarnation, "plan": graph.revision})
        self.layers = StageCompute(started, CPU)
        self.layers.build()
        self.change = LayerChange(
            started,
            CPU,
            SimThread(world.turns),  # type: ignore[arg-type]
            self.layers,
            lambda: self.layers.version,
            self._send,
            lambda: None,
            self._between,
            lambda start: None,
            LayerChangeTimes(follow_s=60.0, fill_s=60.0),
        )
        self.handlers = {row.name: handle for row, handle in self.change.orders()}

    @property
    def role(self) -> str:
        """Its part in the plan that it has built, in words."""
        built = self.change.built
        if built is None:
            return "member"
        parts = [
            name for name, ranges in (("giver", built.order.gives), ("taker", built.order.takes)) if ranges
        ]
        return " and ".join(parts) or "keeper"

    async def _between(self, attempt: int, fenced: Sequence[Member]) -> None:
        await self._world.turns()
        self.attempt = attempt

    async def _send(
        self,
        to: Member,
        plan: int,
        direction: str,
        first: int,
        step: int,
        tensors: Sequence[Tensor],
        rate: float | None,
    ) -> str:
        notice: Any = SimpleNamespace(
            transfer=plan,
            sender=self.member,
            microbatch=first,
            direction=direction,
            step=step,
            learning_rate=rate,
        )
        carried = [tensor.clone() for tensor in tensors]
        while True:
            await self._world.turns()
            there = self._world.members.get(to.sid)
            if not self.alive or there is None or there.member != to or not there.alive:
                raise PeerUnreachable(f"{to.sid} is dead", peer=to.sid)
            answer = there.change.offered(notice)
            if answer == "accepted":
                there.change.received(notice, carried)
                return "delivered"
            if answer != "later":
                return answer

    def state(self) -> dict[str, Tensor]:
        """The state of its layers, by the keys of a checkpoint; views of the live state."""
        return layer_state(self.layers, self.layers.names_in(0, LAYERS))

    def load(self, version: int, state: dict[str, Tensor], source: str) -> None:
        """Takes the state of a checkpoint, or of a peer."""
        self.change.drop("all go back to a checkpoint")
        load_layers(self.layers, version, state, source)

    def step(self, step: int) -> None:
        gradients = [self._world.gradient(name, step) for name in self.layers.summed_names]
        self.layers.redo(step, gradients, 0.01)
        self.change.applied(step, gradients, 0.01)

    def die(self) -> None:
        self.alive = False
        self.change.close()


class SimData:
    """A data instance: all that a re-cut changes of it is the attempt."""

    def __init__(self, member: Member, attempt: int) -> None:
        self.member, self.alive, self.attempt = member, True, attempt

    async def abort(self, order: StepAbort) -> None:
        self.attempt = max(self.attempt, order.attempt)

    def die(self) -> None:
        self.alive = False
