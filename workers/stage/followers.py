"""Newcomers that follow this instance until they join its stage (DESIGN §5 rule 10).

One is sent a snapshot, then each step as redo, as a holder of a copy is (`workers.links.peer_copy`). Steps
are prepared and applied meanwhile; what holds the stage up is the last redo, which the orchestrator waits
for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

from torch import Tensor

from bus.logs import get_logger
from schemas.errors import Conflict, DmscError
from schemas.step import Member
from workers.links.hop_exchange import Outcome
from workers.links.peer_copy import Snapshot
from workers.links.redo_queue import RedoQueue
from workers.transport.pinned_buffers import HostCopy

log = get_logger("instance")

OVERFLOWS = 2
"""Of its queue, before a newcomer counts as too slow to follow: at the first, its link may be just built."""

FollowDirection = Literal["state", "redo"]
SendState = Callable[[Member, int, FollowDirection, int, Sequence[Tensor]], Awaitable[Outcome]]
"""(newcomer, number of the transfer, direction, step, tensors): over the exchange."""


class Follower:
    """One newcomer in one transfer. Owned by the event loop; `close` it."""

    def __init__(self, to: Member, transfer: int, send: SendState, snapshot: Snapshot) -> None:
        self.transfer = transfer
        self.sent_bytes = 0
        """Of its newest snapshot."""
        self._to = to
        self._send = send
        self._snapshot = snapshot
        self._queue: RedoQueue[HostCopy] = RedoQueue()
        self._error: DmscError | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._pump(), name=f"follower {to.sid}")

    @property
    def slow(self) -> bool:
        """It does not keep up, and is sent nothing more."""
        return self._queue.overflows >= OVERFLOWS

    @property
    def over(self) -> bool:
        return self.slow or self._error is not None

    def applied(self, step: int, redo: HostCopy) -> None:
        """`step` was applied with these clipped mean gradients, in parameter order; none: it was left out."""
        if self.over:
            return
        self._queue.applied(step, redo)
        if self.slow:
            self._queue.afresh()
        self._news.set()

    async def caught_up(self, patience_s: float) -> int:
        """The version that it was brought to, once nothing waits here for it and one redo at most is on its
        way; −1: that is not so in time.

        Raises:
            DmscError: it can't be reached, takes nothing, or follows no more.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._queue.due and not self.over:
                    self._news.clear()
                    await self._news.wait()
        if self._error is not None:
            raise self._error
        return -1 if self.slow or self._queue.due or self._queue.reached is None else self._queue.reached

    def end(self, why: str) -> None:
        """It follows no more, because of `why`."""
        if self._error is None:
            self._error = Conflict(f"{self._to.sid} does not follow any more: {why}")
        self._queue.afresh()
        self._news.set()
        self._task.cancel()

    async def _pump(self) -> None:
        try:
            while not self.over:
                if self._queue.due:
                    await self._next()
                    self._news.set()
                else:
                    self._news.clear()
                    await self._news.wait()
        except Exception as error:  # a newcomer's affair: the stage itself goes on
            if not isinstance(error, DmscError):
                log.error("follower", exc_info=error)
                error = DmscError(f"the state could not be sent: {error}")
            self._error = self._error or error
            self._queue.afresh()
            self._news.set()

    async def _next(self) -> None:
        redo = self._queue.next()
        if redo is None:
            version, tensors = await self._snapshot()
            self._queue.taken(version)
            self.sent_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            await self._tell("state", version, tensors)
            self._queue.brought_to(version)
        else:
            step, gradients = redo
            await self._tell("redo", step, await gradients.there())
            self._queue.brought_to(step + 1, redo=True)

    async def _tell(self, direction: FollowDirection, step: int, tensors: Sequence[Tensor]) -> None:
        outcome = await self._send(self._to, self.transfer, direction, step, tensors)
        if outcome != "delivered":
            raise Conflict(f"{self._to.sid} takes no {direction} of step {step}: {outcome}")


class Followers:
    """All that follow one instance."""

    def __init__(self, send: SendState, snapshot: Snapshot) -> None:
        self._send = send
        self._snapshot = snapshot
        self._followers: dict[Member, Follower] = {}

    def __bool__(self) -> bool:
        return any(not follower.over for follower in self._followers.values())

    def follow(self, to: Member, transfer: int) -> Follower:
        """Has it follow, as transfer number `transfer`. Idempotent.

        Raises:
            Conflict: a later transfer to it has begun.
        """
        present = self._followers.get(to)
        if present is not None and present.transfer == transfer:
            return present
        if present is not None and present.transfer > transfer:
            raise Conflict(f"transfer {transfer} to {to.sid} was overtaken by number {present.transfer}")
        self.end([to], "another transfer begins")
        self._followers[to] = follower = Follower(to, transfer, self._send, self._snapshot)
        return follower

    def applied(self, step: int, redo: HostCopy) -> None:
        """See `Follower.applied`."""
        for follower in self._followers.values():
            follower.applied(step, redo)

    def end(self, members: Iterable[Member], why: str) -> None:
        """Those among them that follow do so no more."""
        for member in members:
            follower = self._followers.pop(member, None)
            if follower is not None:
                follower.end(why)

    def end_all(self, why: str) -> None:
        self.end(list(self._followers), why)
