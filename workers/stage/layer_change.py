"""A stage instance's part in a re-cut (ADR-0090): other layers are built beside those that train.

The layers that it gets, a range for each source, are small stages of their own until the switch: each takes a
snapshot and then each step as a redo, as a newcomer does. The stage that it will be has the memory of these
and of the layers that it keeps in common with them; what can't be in common is copied while training rests.
By the switch it takes the place of the present one. Before that it computes and changes nothing, so
forgetting what was built undoes all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bus.logs import get_logger
from bus.subject_row import Subject
from bus.subjects import RECUT_DROP, RECUT_FILL, RECUT_PREPARE, RECUT_SEND, RECUT_SWITCH
from bus.tasks import TaskSet
from schemas.cluster import InstanceStart
from schemas.data_plane import HopDirection, MicrobatchNotice
from schemas.errors import Ack, Conflict, DmscError
from schemas.recut import (
    LayerRange,
    RecutDrop,
    RecutFill,
    RecutPrepare,
    RecutReady,
    RecutSend,
    RecutSwitch,
)
from schemas.step import Member
from schemas.task_graph import TaskUnit
from workers.compute.compute_thread import ComputeThread
from workers.compute.stage_compute import StageCompute
from workers.links.hop_exchange import STATE, Outcome
from workers.local_store.recorder import Order
from workers.stage.followers import Follower
from workers.state.layer_state import (
    SnapshotInPieces,
    gradients_of,
    layer_state,
    load_layers,
    packed,
    redo_layers,
    snapshot_of,
    unpacked,
)
from workers.transport.pinned_buffers import HostCopy
from workers.user_code import describe

log = get_logger("instance")

SendLayers = Callable[
    [Member, int, HopDirection, int, int, Sequence[Tensor], float | None], Awaitable[Outcome]
]
"""Sends over the exchange: (receiver, revision, direction, first layer, step, tensors, learning rate)."""

SNAPSHOT_TRIES = 2
"""Steps in which a snapshot is taken in pieces, between microbatches; then it is taken at once."""

Source = tuple[Member, int]
"""Who sends layers, and the first of them."""


@dataclass(frozen=True, kw_only=True)
class LayerChangeTimes:
    """How long the orders of a re-cut wait before they are answered, in seconds, and how much time of the
    computing thread is left to training."""

    follow_s: float = 10.0
    """An order to send: for the receivers to catch up. It is then asked again."""
    fill_s: float = 20.0
    """An order to fill: for the last redo to arrive, which is on its way."""
    patience_s: float = 1.0
    """What training does not wait for: for the thread to have nothing else to do."""
    rest: float = 12.0
    """Such work then rests for so many times as long as it took: steps take a twelfth longer at most."""
    rest_most_s: float = 5.0


@dataclass(slots=True)
class _Arriving:
    """Layers that come from elsewhere. `version`: −1 until their state is here."""

    stage: StageCompute
    version: int = -1
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # redos follow their state


@dataclass(slots=True)
class _Giving:
    """Layers that go elsewhere: the names of their weights, and who is sent them."""

    names: frozenset[str]
    follower: Follower


@dataclass(slots=True)
class BuiltPlan:
    """What was built for a plan that is not in force. `filled`: the version whose state it has; −1: none."""

    order: RecutPrepare
    stage: StageCompute
    building: asyncio.Future[None]
    arriving: dict[Source, _Arriving] = field(default_factory=dict)
    giving: dict[tuple[Member, int], _Giving] = field(default_factory=dict)
    filled: int = -1

    @property
    def is_built(self) -> bool:
        return self.building.done() and not self.building.cancelled() and self.building.exception() is None


class LayerChange:
    """Builds, sends, receives and completes what a plan makes of this instance.

    Args:
        start: What it was started with; its `plan` is that in force.
        device: The device that computes.
        thread: The thread that computes, and builds: both draw from the same generators.
        layers: The present stage.
        version: Returns the number of applied steps.
        send: Sends layers over the exchange.
        reconsider: Asks again about offers that were put off.
        between: Drops whatever the present plan cuts, for an attempt, and fences members.
        changed: Called with what it is from now on.
        times: How long orders wait.
    """

    def __init__(
        self,
        start: InstanceStart,
        device: torch.device,
        thread: ComputeThread,
        layers: StageCompute,
        version: Callable[[], int],
        send: SendLayers,
        reconsider: Callable[[], None],
        between: Callable[[int, Sequence[Member]], Awaitable[None]],
        changed: Callable[[InstanceStart], None],
        times: LayerChangeTimes = LayerChangeTimes(),
    ) -> None:
        self.plan = start.plan
        self.built: BuiltPlan | None = None
        self._given_up = -1, -1
        """Epoch and revision of the latest plan dropped by order: the order to build it may be late."""
        self._member = Member(sid=start.unit.sid, incarnation=start.incarnation)
        self._version = version
        self._between = between
        self._changed = changed
        self._switching = asyncio.Lock()
        self._tasks = TaskSet(self._not_taken)
        self._start = start
        self._device = device
        self._thread = thread
        self._layers = layers
        self._send = send
        self._reconsider = reconsider
        self._times = times
        self._moved = asyncio.Event()

    def orders(self) -> list[tuple[Subject, Order]]:
        """The orders that it obeys, and their handlers."""
        return [
            (RECUT_PREPARE, self.prepare),
            (RECUT_SEND, self.send),
            (RECUT_FILL, self.fill),
            (RECUT_SWITCH, self.switch),
            (RECUT_DROP, self.dropped),
        ]

    # --- building ---------------------------------------------------------------------------------------
    async def prepare(self, order: RecutPrepare) -> Ack:
        """Builds what the plan makes of this instance. Idempotent.

        Raises:
            Conflict: The plan is older than that in force or than one that is built, it was given up, or it
                can't be built here.
        """
        if (order.epoch, order.plan) <= self._given_up:
            raise Conflict(f"plan {order.plan} is to be built, but it was given up")
        if order.plan <= self.plan:
            raise Conflict(f"plan {order.plan} is to be built, but plan {self.plan} is in force here")
        built = self.built
        if built is not None and built.order.plan > order.plan:
            raise Conflict(f"plan {order.plan} is to be built, but plan {built.order.plan} is")
        if built is None or built.order != order:
            self.drop("another plan is built")
            built = self._begin(order)
        try:
            await asyncio.shield(built.building)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not built.building.cancelled() or (task is not None and task.cancelling()):
                raise
            raise Conflict(f"plan {order.plan} was given up while it was built") from None
        except DmscError:
            self._forget(built)
            raise
        except Exception as error:  # the device's memory, or the job's code
            self._forget(built)
            raise Conflict(f"{self._member.sid} can't build plan {order.plan}: {describe(error)}") from error
        self._reconsider()
        return Ack()

    def _begin(self, order: RecutPrepare) -> BuiltPlan:
        stage = self._stage_of(order.unit)
        arriving = {
            (each.peer, each.first_layer): _Arriving(self._stage_of(_part(order.unit, each)))
            for each in order.takes
        }

        async def build() -> None:
            taken = [each.stage for each in arriving.values()]
            for one in taken:
                await self._beside(partial(one.build, given=_any, blank=True))
            await self._beside(partial(stage.build, given=_any, shared=(self._layers, *taken)))

        building = asyncio.ensure_future(build())
        building.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.built = BuiltPlan(order, stage, building, arriving)
        return self.built

    async def _beside(self, task: Callable[[], object]) -> None:
        """Has the thread that computes do something when it is idle, and leaves it alone for a while."""
        _, took_s = await self._thread.beside(task, self._times.patience_s)
        await asyncio.sleep(min(self._times.rest * took_s, self._times.rest_most_s))

    def _stage_of(self, unit: TaskUnit) -> StageCompute:
        return StageCompute(self._start.model_copy(update={"unit": unit}), self._device)

    def _forget(self, built: BuiltPlan) -> None:
        if self.built is built:
            self.drop("it can't be built")

    def drop(self, why: str) -> None:
        """Forgets what was built; nobody is sent anything more."""
        if self.built is not None:
            log.info("plan dropped", plan=self.built.order.plan, sid=self._member.sid, reason=why)
        self._end(why)

    def _end(self, why: str) -> None:
        built, self.built = self.built, None
        if built is not None:
            built.building.cancel()
            for giving in built.giving.values():
                giving.follower.end(why)
            self._moved.set()
            self._reconsider()

    def close(self) -> None:
        """Ends whatever is under way."""
        self.drop("it ends")
        self._tasks.cancel_all()

    async def dropped(self, order: RecutDrop) -> Ack:
        """Forgets the plan, if it is this one, and builds it no more. Idempotent."""
        self._given_up = max(self._given_up, (order.epoch, order.plan))
        if self.built is not None and self.built.order.plan == order.plan:
            self.drop("it was given up")
        return Ack()

    def _present(self, plan: int) -> BuiltPlan:
        built = self.built
        if built is None or built.order.plan != plan or not built.is_built:
            raise Conflict(f"{self._member.sid} has not built plan {plan}")
        return built

    # --- sending ----------------------------------------------------------------------------------------
    async def send(self, order: RecutSend) -> RecutReady:
        """Streams what this instance gives; answers with what the receivers have reached, or −1 after a
        while.

        Raises:
            Conflict: Nothing was built for the plan, or a receiver takes nothing.
        """
        built = self._present(order.plan)
        for each in built.order.gives:
            key = each.peer, each.first_layer
            if key not in built.giving:
                names = self._layers.names_in(each.first_layer, each.last_layer)
                built.giving[key] = _Giving(names, self._follower(order.plan, each, names))
        followers = [each.follower for each in built.giving.values()]
        reached = await asyncio.gather(*(each.caught_up(self._times.follow_s) for each in followers))
        return RecutReady(
            member=self._member,
            plan=order.plan,
            version=min(reached, default=self._layers.version),
            bytes=sum(each.sent_bytes for each in followers),
            slow=any(each.slow for each in followers),
        )

    def _follower(self, plan: int, layers: LayerRange, names: frozenset[str]) -> Follower:
        async def snapshot() -> tuple[int, list[Tensor]]:
            for _ in range(SNAPSHOT_TRIES):
                copying = SnapshotInPieces(self._layers, names)
                while (await self._thread.beside(copying.advance, self._times.patience_s))[0]:
                    pass
                if copying.is_whole:
                    return copying.version, packed(copying.copied)
            return await self._thread.order(partial(snapshot_of, self._layers, names))

        async def send(
            to: Member,
            transfer: int,
            direction: str,
            step: int,
            tensors: Sequence[Tensor],
            rate: float | None,
        ) -> Outcome:
            kind: HopDirection = "layers" if direction == "state" else "layers_redo"
            return await self._send(to, transfer, kind, layers.first_layer, step, tensors, rate)

        return Follower(layers.peer, plan, send, snapshot)

    def applied(self, step: int, gradients: Sequence[Tensor], rate: float | None) -> None:
        """A step was applied here, by these clipped mean gradients; none: it was skipped."""
        if self.built is None:
            return
        self.built.filled = -1
        for giving in self.built.giving.values():
            redo = gradients_of(self._layers, giving.names, gradients)
            giving.follower.applied(step, HostCopy(redo, rate))

    def fence(self, members: Sequence[Member]) -> None:
        """Sends nothing more to these. What was to come from one of them will not: all of it is dropped.

        What is complete already lacks nothing: its plan may be in force.
        """
        built = self.built
        incomplete = built is not None and built.filled != self._version()
        if built is not None and incomplete and any(source in members for source, _ in built.arriving):
            self.drop("a source of its layers is fenced")
        if self.built is not None:
            for (to, _), giving in self.built.giving.items():
                if to in members:
                    giving.follower.end("it is fenced")

    # --- receiving --------------------------------------------------------------------------------------
    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer of layers by somebody who is not fenced."""
        built = self.built
        if notice.transfer <= self.plan or (built is not None and notice.transfer < built.order.plan):
            return "stale"
        if built is None or notice.transfer > built.order.plan or not built.is_built:
            return "later"
        return "accepted" if (notice.sender, notice.microbatch) in built.arriving else "stale"

    def cuts_otherwise(self, notice: MicrobatchNotice) -> bool:
        """Whether this is state of stages that another plan cuts; equal blocks would fit all the same."""
        return notice.direction in STATE and notice.plan not in (None, self.plan)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Takes the state of layers, or the redo of a step."""
        self._tasks.create(self._take(notice, tensors))  # not the runtime's: they outlast an attempt

    def _not_taken(self, _: asyncio.Task[Any], error: BaseException) -> None:
        log.error("layers not taken", sid=self._member.sid, exc_info=error)
        self.drop(describe(error))

    async def _take(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        built = self.built
        if built is None or built.order.plan != notice.transfer:
            return
        arriving = built.arriving[notice.sender, notice.microbatch]
        async with arriving.turn:
            stage = arriving.stage
            if notice.direction == "layers":
                state = unpacked(tensors)
                source = f"what {notice.sender.sid} sent"
                load = partial(load_layers, stage, notice.step, state, source)
                await self._thread.beside(load, self._times.patience_s)
                reached = notice.step
            elif notice.step == arriving.version:
                rate = notice.learning_rate
                await self._thread.order(lambda: redo_layers(stage, notice.step, tensors, rate))
                reached = notice.step + 1
            else:
                return
            arriving.version = reached
            self._moved.set()

    async def fill(self, order: RecutFill) -> RecutReady:
        """Completes what was built with the state of this version, which is the present one. Idempotent.

        Raises:
            Conflict: Nothing was built for the plan, or what comes from others is not here in time.
        """
        built = self._present(order.plan)
        try:
            async with asyncio.timeout(self._times.fill_s):
                while any(each.version != order.version for each in built.arriving.values()):
                    self._moved.clear()
                    await self._moved.wait()
                    self._present(order.plan)  # it may have been dropped
        except TimeoutError:
            behind = [sid.sid for (sid, _), each in built.arriving.items() if each.version != order.version]
            raise Conflict(
                f"the layers of {', '.join(behind)} are not at version {order.version} at {self._member.sid} "
                f"after {self._times.fill_s:g} s"
            ) from None
        if built.filled != order.version:
            await self._thread.order(lambda: self._merge(built, order.version))
            built.filled = order.version
        return RecutReady(member=self._member, plan=order.plan, version=order.version)

    def _merge(self, built: BuiltPlan, version: int) -> None:
        unit = built.order.unit
        state: dict[str, Tensor] = {}
        for each in built.arriving.values():
            module = each.stage.module
            state |= layer_state(each.stage, each.stage.names_in(module.first_layer, module.last_layer))
        state |= layer_state(self._layers, self._layers.names_in(unit.first_layer, unit.last_layer))
        load_layers(built.stage, version, state, "what was copied")

    # --- the switch -------------------------------------------------------------------------------------
    async def switch(self, order: RecutSwitch) -> RecutReady:
        """Goes over to the layers of the plan in force, which it has completed. Idempotent.

        Raises:
            Conflict: It has not.
        """
        async with self._switching:
            if order.plan != self.plan:
                if order.step != self._version() or not self._is_complete(order.plan):
                    raise Conflict(
                        f"plan {order.plan} is in force, and {self._member.sid} has not completed it"
                    )
                await self._go_over(order.attempt, order.fenced)
        return RecutReady(member=self._member, plan=self.plan, version=self._version())

    async def adopted(self, plan: int | None, attempt: int) -> None:
        """A new orchestrator leads, and by the job's record this plan is in force: it goes over to it if it
        has completed it, and forgets any other. None: it does not say."""
        async with self._switching:
            if plan is not None and self._is_complete(plan):
                await self._go_over(attempt, ())
            elif plan is not None:
                self.drop("another orchestrator leads")

    def _is_complete(self, plan: int) -> bool:
        built = self.built
        return built is not None and built.order.plan == plan and built.filled == self._version()

    async def _go_over(self, attempt: int, fenced: Sequence[Member]) -> None:
        built = self.built
        assert built is not None
        await self._between(attempt, fenced)
        await self._thread.order(lambda: self._layers.become(built.stage))
        self.plan = built.order.plan
        self._start = self._start.model_copy(update={"unit": built.order.unit, "plan": self.plan})
        self._end("it is in force")
        self._changed(self._start)


def _any(name: str) -> bool:
    """No weight is initialised: all are loaded, or there already."""
    return True


def _part(unit: TaskUnit, layers: LayerRange) -> TaskUnit:
    return unit.model_copy(update={"first_layer": layers.first_layer, "last_layer": layers.last_layer})
