"""The reduction group of a stage's instance: formed by order, used by `prepare`, released on any error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from torch import Tensor

from schemas.errors import Fenced, PeerUnreachable
from schemas.step import GroupForm, Member
from workers.compute.sum_in_parts import SumInParts
from workers.links.reduction import ReductionGroup, ReductionPatience
from workers.stage.hop_runtime import InstanceContext

T = TypeVar("T")


class StageReduction:
    """The group of the newest ordered generation, with this instance in it."""

    def __init__(self, context: InstanceContext) -> None:
        self.group: ReductionGroup | None = None
        self.generation = -1
        """The generation that was ordered last; −1: none."""
        self._context = context
        self._patience = ReductionPatience(context.links.timeout_s)
        self._forming: asyncio.Task[ReductionGroup] | None = None

    def includes(self, members: Iterable[Member]) -> bool:
        """Whether one of these members is in the group."""
        return self.group is not None and not set(self.group.members).isdisjoint(members)

    async def form(self, order: GroupForm) -> None:
        """Builds the group of the ordered generation, whose predecessor is released; at most once.

        Raises:
            Fenced: A later generation was ordered meanwhile.
            PeerUnreachable: Not all members came in time.
        """
        self.generation = order.generation
        self._forming = forming = asyncio.create_task(self._build(order))
        try:
            self.group = await forming
        except asyncio.CancelledError:
            if forming.cancelled() and self.generation != order.generation:
                raise Fenced(f"generation {order.generation} was overtaken") from None
            raise

    async def _build(self, order: GroupForm) -> ReductionGroup:
        context = self._context
        return await ReductionGroup.build(
            context.bus,
            job=context.start.job,
            stage=context.start.unit.stage,
            generation=order.generation,
            members=order.members,
            me=context.member,
            epoch=order.epoch,
            parts=order.parts,
            config=context.links,
        )

    async def all_reduce(self, group: ReductionGroup, flat: Tensor) -> Tensor:
        """Sums `flat` over the group, in a time that fits its size and the speed of the last sums."""
        return await self._timed(flat.nbytes, partial(group.all_reduce, flat))

    async def exchange(self, group: ReductionGroup, parts: SumInParts) -> None:
        """Has each member sum a part, in such a time."""
        await self._timed(parts.bytes, partial(group.exchange, parts.exchange))

    async def _timed(self, size: int, reduce: Callable[..., Awaitable[T]]) -> T:
        began = time.perf_counter()
        try:
            reduced = await reduce(timeout_s=self._patience.timeout_s(size))
        except PeerUnreachable:
            self._patience.failed(size, time.perf_counter() - began)
            raise
        self._patience.took(size, time.perf_counter() - began)
        return reduced

    def release(self) -> None:
        """Ends the group; its waiters get an error at once."""
        if self._forming is not None and not self._forming.done():
            self._forming.cancel()
        if self.group is not None:
            self.group.release()
            self.group = None
