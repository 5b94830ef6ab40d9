"""A stage's part in the prepare (DESIGN §5): its sum is reduced over the replicas, and voted on.

A vote stays until the step is applied, aborted, or its group ends: every repetition of the order gets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from schemas.errors import Conflict, Fenced
from schemas.step import StepPrepare, StepVote
from workers.compute.compute_thread import ComputeThread
from workers.compute.stage_compute import StageCompute
from workers.links.hop_exchange import TensorTransfer
from workers.links.reduction import ReductionGroup
from workers.stage.hop_runtime import InstanceContext
from workers.stage.stage_reduction import StageReduction
from workers.stage.tied_sums import TiedSums
from workers.telemetry.load import ComputeLoad


@dataclass(slots=True)
class Prepared:
    """A reduced gradient waiting for the decision."""

    vote: StepVote
    gradients: list[Tensor]


class Preparation:
    """The reduction group of an instance, and what it has prepared in it.

    Args:
        context: The incarnation and its surroundings.
        thread: The thread that computes.
        layers: The stage's state, on that thread.
        load: Where the time of reductions is noted.
        open_step: (version, attempt) of the open step.
        send: Sends a transfer, in the background.
    """

    def __init__(
        self,
        context: InstanceContext,
        thread: ComputeThread,
        layers: StageCompute,
        load: ComputeLoad,
        open_step: Callable[[], tuple[int, int]],
        send: Callable[[TensorTransfer], None],
    ) -> None:
        self.reduction = StageReduction(context)
        self.tied = TiedSums(context.member, context.start.unit.stage, send)
        self.prepared: Prepared | None = None
        self._member = context.member
        self._thread = thread
        self._layers = layers
        self._load = load
        self._open_step = open_step
        self._voting: tuple[tuple[int, int, int], asyncio.Task[StepVote]] | None = None

    async def vote(self, order: StepPrepare) -> StepVote:
        """All-reduces a copy of the sum and votes with the microbatches in it. Idempotent.

        Raises:
            Conflict: The order is of another generation, or was given up.
        """
        group = self.reduction.group
        if order.generation != self.reduction.generation or group is None:
            raise Conflict(
                f"prepare in generation {order.generation}, but my group is {self.reduction.generation}"
            )
        if order.tied:
            self.tied.send_again(order)
        earlier = self.prepared.vote if self.prepared is not None else None
        if earlier is not None and (earlier.generation, earlier.step) == (order.generation, order.step):
            return earlier
        if not order.tied:
            return await self._vote(order, group)
        key = (order.step, order.attempt, order.generation)
        if self._voting is None or self._voting[0] != key or self._voting[1].done():
            self._voting = (key, asyncio.create_task(self._vote(order, group)))
            self._voting[1].add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._voting[1])

    async def _vote(self, order: StepPrepare, group: ReductionGroup) -> StepVote:
        reduce_ms = 0.0
        if len(group.members) == 1 and not order.tied:
            microbatches, (gradients, checksum, norms) = await self._thread.order(self._layers.finish_alone)
        else:
            began = time.perf_counter()
            microbatches, flat = await self._thread.order(self._layers.copy_sum)
            reduced = await self.reduction.all_reduce(group, flat)
            if order.tied:
                await self.tied.add(order, reduced, self._layers.shared_with, lambda: self._is_open(order))
            reduce_ms = (time.perf_counter() - began) * 1e3
            if (order.step, order.attempt) != self._open_step():
                raise Fenced("aborted while reducing")
            gradients, checksum, norms = await self._thread.order(
                lambda: self._layers.finish_reduced(reduced)
            )
        self._load.reduce_ms = reduce_ms
        own = self._layers.own_schedule
        rate = None if own is None else await self._thread.order(lambda: own.rate(order.step))
        vote = StepVote(
            member=self._member,
            step=order.step,
            attempt=order.attempt,
            generation=order.generation,
            microbatches=tuple(sorted(microbatches)),
            checksum=checksum,
            squared_norms=norms,
            reduce_ms=reduce_ms,
            learning_rate=rate,
        )
        if self._is_open(order):
            self.prepared = Prepared(vote, gradients)
        return vote

    def _is_open(self, order: StepPrepare) -> bool:
        """Whether the order is in force: its step is open, and its generation the present one."""
        return (order.step, order.attempt) == self._open_step() and (
            order.generation == self.reduction.generation and self.reduction.group is not None
        )

    def release(self) -> None:
        """Ends the group; its waiters get an error at once, and the gradient reduced in it is dropped."""
        self.prepared = None
        self.reduction.release()
        self.tied.woken()
