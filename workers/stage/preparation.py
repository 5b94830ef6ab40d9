"""A stage's part in the prepare (DESIGN §5): its sum is reduced over the replicas, and voted on.

A vote stays until the step is applied, aborted, or its group ends: every repetition of the order gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bus.wire import request_progress
from bus.wire.request_progress import RequestProgress
from schemas.data_plane import MicrobatchNotice
from schemas.errors import Conflict, Fenced
from schemas.step import Member, StepPrepare, StepVote
from workers.compute.compute_thread import ComputeThread
from workers.compute.gradient_sum import GradientSum
from workers.compute.stage_compute import Finished, StageCompute
from workers.links.offers import TensorTransfer
from workers.links.reduction import ReductionGroup
from workers.stage.hop_runtime import InstanceContext
from workers.stage.stage_reduction import StageReduction
from workers.stage.tied_sums import TiedSums
from workers.telemetry.load import ComputeLoad

TiedChecksums = tuple[tuple[int, str], ...]


@dataclass(slots=True)
class Prepared:
    """A reduced gradient waiting for the decision."""

    vote: StepVote
    gradients: list[Tensor]


@dataclass(slots=True)
class _Voting:
    """A vote under way, for all orders to prepare that name the same `group`: (step, attempt, generation)."""

    group: tuple[int, int, int]
    progress: RequestProgress
    task: asyncio.Task[StepVote]


class Preparation:
    """The reduction group of an instance, and what it has prepared in it.

    Args:
        context: The incarnation and its surroundings.
        thread: The thread that computes.
        layers: The stage's state, on that thread.
        load: Where the time of reductions is noted.
        open_step: (version, attempt) of the open step.
        send: Sends a transfer, in the background, until the receiver has it or the step is over.
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
        self.tied: TiedSums[Tensor] = TiedSums()
        self.prepared: Prepared | None = None
        self._member = context.member
        self._stage = context.start.unit.stage
        self._microbatches = context.start.spec.training.microbatches
        self._alive_s = context.links.waiting_alive_s
        self._thread = thread
        self._layers = layers
        self._load = load
        self._open_step = open_step
        self._send = send
        self._news = asyncio.Event()
        self._voting: _Voting | None = None
        self._finishing: tuple[tuple[int, int], asyncio.Future[tuple[frozenset[int], Finished]]] | None = None

    def summed(self) -> None:
        """Finishes the sum as soon as it has the step's last microbatch, if its stage has no other member.

        The order to prepare, which comes only after the claim and the orchestrator's answer, finds that done.
        """
        group, step = self.reduction.group, self._open_step()
        if group is None or len(group.members) > 1 or self._layers.is_tied or self._finished(step):
            return
        if len(self._layers.sum.microbatches) == self._microbatches:
            finishing = self._thread.order(self._layers.finish_alone)
            finishing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._finishing = (step, finishing)

    def _finished(self, step: tuple[int, int]) -> asyncio.Future[tuple[frozenset[int], Finished]] | None:
        """The finished sum of this step and attempt, if `summed` has begun to make it."""
        return self._finishing[1] if self._finishing is not None and self._finishing[0] == step else None

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
        key = (order.step, order.attempt, order.generation)
        if order.tied:
            others = ((tied.stage, tied.receivers) for tied in order.tied)
            self._send_sums(order, self.tied.ordered(key, others))
        earlier = self.prepared.vote if self.prepared is not None else None
        if earlier is not None and (earlier.generation, earlier.step) == (order.generation, order.step):
            return earlier
        if not order.tied:
            return await self._vote(order, group)
        if self._voting is None or self._voting.group != key or self._voting.task.done():
            self._voting = self._begin(order, group, key)
        request_progress.follow(self._voting.progress)
        return await asyncio.shield(self._voting.task)

    def _begin(self, order: StepPrepare, group: ReductionGroup, key: tuple[int, int, int]) -> _Voting:
        progress = RequestProgress()
        outer = request_progress.present.set(progress)
        try:
            task = asyncio.create_task(self._vote(order, group))
        finally:
            request_progress.present.reset(outer)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return _Voting(key, progress, task)

    async def _vote(self, order: StepPrepare, group: ReductionGroup) -> StepVote:
        reduce_ms = 0.0
        tied: TiedChecksums = ()
        if len(group.members) == 1 and not order.tied:
            finishing = self._finished((order.step, order.attempt))
            if finishing is None:
                finishing = self._thread.order(self._layers.finish_alone)
            microbatches, (gradients, checksum, norms) = await asyncio.shield(finishing)
        elif self._layers.sum.in_parts and not order.tied:
            self._finishing = None
            shares = group.parts or (1.0,) * len(group.members)
            parts = await self._thread.order(lambda: self._layers.begin_parts(group.rank, shares))
            began = time.perf_counter()
            await self.reduction.exchange(group, parts)
            reduce_ms = (time.perf_counter() - began) * 1e3
            if (order.step, order.attempt) != self._open_step():
                raise Fenced("aborted while reducing")
            microbatches = parts.microbatches
            gradients, checksum, norms = await self._thread.order(lambda: self._layers.finish_parts(parts))
        else:
            self._finishing = None
            began = time.perf_counter()
            microbatches, flat = await self._thread.order(self._layers.copy_sum)
            reduced = await self.reduction.all_reduce(group, flat)
            if order.tied:
                tied = await self._add_tied(order, reduced)
            reduce_ms = (time.perf_counter() - began) * 1e3
            if (order.step, order.attempt) != self._open_step():
                raise Fenced("aborted while reducing")
            gradients, checksum, norms = await self._thread.order(
                lambda: self._layers.finish_reduced(reduced)
            )
        self._load.reduce_ms = reduce_ms
        own = self._layers.own_schedule
        rate = None if own is None else await self._thread.order(lambda: own.rate(order.step))
        scale: float | None = None
        overflowed: tuple[int, ...] = ()
        if self._layers.scales_loss:
            scale, overflowed = await self._thread.order(self._layers.scaling)
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
            tied=tied,
            loss_scale=scale,
            overflowed=overflowed,
        )
        if self._is_open(order):
            self.prepared = Prepared(vote, gradients)
        return vote

    async def _add_tied(self, order: StepPrepare, reduced: Tensor) -> TiedChecksums:
        """Adds the sums of tied stages to `reduced`, once all have come; sends them this stage's.

        Returns:
            For each of them the checksum of what both share, which must be the same there.

        Raises:
            Conflict: The order was given up meanwhile.
        """
        shared = {tied.stage: self._layers.shared_with(tied) for tied in order.tied}
        parts = {stage: own for stage, own in sorted(shared.items()) if own}
        sums = await self._thread.order(
            lambda: {stage: _joined(reduced, own) for stage, own in parts.items()}
        )
        if self._is_open(order):
            self._send_sums(order, self.tied.reduced(sums))
        while (came := self.tied.of(order.step, order.attempt, parts)) is None:
            if not self._is_open(order):
                raise Conflict(f"prepare of step {order.step}/{order.attempt} was given up")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._alive_s):
                    await self._news.wait()
            request_progress.moved()
        return await self._thread.order(functools.partial(add_tied, reduced, self._stage, parts, came))

    def _send_sums(self, order: StepPrepare, sends: Sequence[tuple[Member, Tensor]]) -> None:
        for receiver, sums in sends:
            self._send(
                TensorTransfer(
                    direction="tied",
                    receiver=receiver,
                    stage=self._stage,
                    step=order.step,
                    attempt=order.attempt,
                    tensors=(sums,),
                )
            )

    def arrived(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Takes the sum of a tied stage."""
        if (notice.step, notice.attempt) == self._open_step():
            self.tied.arrived(notice.step, notice.attempt, notice.stage, tensors[0])
            self._news.set()

    def _is_open(self, order: StepPrepare) -> bool:
        """Whether the order is in force: its step is open, and its generation the present one."""
        return (order.step, order.attempt) == self._open_step() and (
            order.generation == self.reduction.generation and self.reduction.group is not None
        )

    def release(self) -> None:
        """Ends the group; its waiters get an error at once, and the gradient reduced in it is dropped."""
        self.prepared = None
        self.reduction.release()
        self._news.set()

    def forget(self) -> None:
        """Drops what was prepared and exchanged: its step is applied, or its attempt is over."""
        self.prepared = None
        self._finishing = None
        self.tied.clear()


def add_tied(
    flat: Tensor, stage: int, parts: Mapping[int, Sequence[slice]], came: Mapping[int, Tensor]
) -> TiedChecksums:
    """Adds the sums of tied stages in the order of stages: so float sums have the same bits in each, too.

    Args:
        flat: (parameters,) int64 or fp32, this stage's sum; changed in place.
        stage: This stage.
        parts: Other stage → the parts of `flat` that it shares.
        came: Other stage → its sum of these parts, (their elements,).

    Returns:
        For each other stage the checksum of what both share.
    """
    addends: dict[tuple[int, int], dict[int, Tensor]] = {}
    for other, own in parts.items():
        sizes = [part.stop - part.start for part in own]
        for part, sums in zip(own, torch.split(came[other], sizes), strict=True):
            addends.setdefault((part.start, part.stop), {})[other] = sums
    for (begin, end), by_stage in addends.items():
        total = flat[begin:end]
        before = [by_stage[other] for other in sorted(by_stage) if other < stage]
        behind = [by_stage[other] for other in sorted(by_stage) if other > stage]
        if before:
            total += functools.reduce(torch.add, before)
        for sums in behind:
            total += sums
    return tuple((other, _checksum(flat, own)) for other, own in parts.items())


def _checksum(flat: Tensor, parts: Sequence[slice]) -> str:
    each = "".join(GradientSum.checksum(flat[part]) for part in parts)
    return hashlib.blake2b(each.encode(), digest_size=8).hexdigest()


def _joined(flat: Tensor, parts: Sequence[slice]) -> Tensor:
    return torch.cat([flat[part] for part in parts])
