"""Newcomers that follow this instance until they join its stage (DESIGN §5 rule 10).

A follower is sent a snapshot, then each step as a redo, like the holder of a replica
(`workers.links.peer_copy`). The stage prepares and applies steps meanwhile; only the last redo delays it,
since the orchestrator waits for that one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import Literal

from torch import Tensor

from bus.logs import get_logger
from schemas.errors import Conflict, DmscError
from schemas.step import Member, StateReady, StateSend
from workers.links.hop_exchange import Outcome
from workers.links.peer_copy import Snapshot
from workers.links.redo_queue import RedoQueue
from workers.transport.pinned_buffers import HostCopy

log = get_logger("instance")

OVERFLOWS = 2
"""Queue overflows after which a newcomer counts as too slow: at the first, its link may still be built."""

FollowDirection = Literal["state", "redo"]
SendState = Callable[[Member, int, FollowDirection, int, Sequence[Tensor], float | None], Awaitable[Outcome]]
"""Sends over the exchange: (newcomer, number of the transfer, direction, step, tensors, learning rate)."""


class Follower:
    """One newcomer in one transfer. Owned by the event loop; call `end` when it is over."""

    def __init__(self, to: Member, transfer: int, send: SendState, snapshot: Snapshot) -> None:
        self.transfer = transfer
        self.sent_bytes = 0
        """Size of its newest snapshot."""
        self._to = to
        self._send = send
        self._snapshot = snapshot
        self._queue: RedoQueue[HostCopy] = RedoQueue()
        self._error: DmscError | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._pump(), name=f"follower {to.sid}")

    @property
    def slow(self) -> bool:
        """Whether it failed to keep up; it is sent nothing more then."""
        return self._queue.overflows >= OVERFLOWS

    @property
    def over(self) -> bool:
        return self.slow or self._error is not None

    def applied(self, step: int, redo: HostCopy) -> None:
        """Queues `step` with its clipped mean gradients, in parameter order; no gradients: a skipped step."""
        if self.over:
            return
        self._queue.applied(step, redo)
        if self.slow:
            self._queue.afresh()
        self._news.set()

    async def caught_up(self, patience_s: float) -> int:
        """The version that it has reached, once nothing is queued and at most one redo is on its way.

        Returns −1 if it has not caught up after `patience_s`, or is too slow.

        Raises:
            DmscError: It can't be reached, accepts nothing, or has stopped following.
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
        """Ends the following, for the reason `why`."""
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
        except Exception as error:  # only this newcomer fails; the stage goes on
            if not isinstance(error, DmscError):
                log.error("sending state to a newcomer failed", exc_info=error)
                error = DmscError(f"the state could not be sent: {error}")
            self._error = self._error or error
            self._queue.afresh()
            self._news.set()

    async def _next(self) -> None:
        redo = self._queue.next()
        if redo is None:
            version, tensors = await self._snapshot()
            self._queue.taken(version)
            self.sent_bytes = sum(tensor.nbytes for tensor in tensors)
            await self._deliver("state", version, tensors)
            self._queue.brought_to(version)
        else:
            step, gradients = redo
            await self._deliver("redo", step, await gradients.there(), gradients.learning_rate)
            self._queue.brought_to(step + 1, redo=True)

    async def _deliver(
        self,
        direction: FollowDirection,
        step: int,
        tensors: Sequence[Tensor],
        learning_rate: float | None = None,
    ) -> None:
        outcome = await self._send(self._to, self.transfer, direction, step, tensors, learning_rate)
        if outcome != "delivered":
            raise Conflict(f"{self._to.sid} takes no {direction} of step {step}: {outcome}")


class Followers:
    """All followers of one instance."""

    def __init__(self, send: SendState, snapshot: Snapshot) -> None:
        self._send = send
        self._snapshot = snapshot
        self._followers: dict[Member, Follower] = {}

    def __bool__(self) -> bool:
        return any(not follower.over for follower in self._followers.values())

    def follow(self, to: Member, transfer: int) -> Follower:
        """Makes `to` a follower, with transfer number `transfer`. Idempotent.

        Raises:
            Conflict: A later transfer to it has begun.
        """
        present = self._followers.get(to)
        if present is not None and present.transfer == transfer:
            return present
        if present is not None and present.transfer > transfer:
            raise Conflict(f"transfer {transfer} to {to.sid} was overtaken by number {present.transfer}")
        self.end([to], "another transfer begins")
        self._followers[to] = follower = Follower(to, transfer, self._send, self._snapshot)
        return follower

    async def send(
        self, order: StateSend, member: Member, fenced: Container[Member], patience_s: float
    ) -> StateReady:
        """Obeys an order to send state to a follower: the answer of `member`, once that has caught up.

        Raises:
            Conflict: It is fenced, or takes nothing.
        """
        if order.to in fenced:
            raise Conflict(f"{order.to.sid} {order.to.incarnation} is fenced")
        follower = self.follow(order.to, order.transfer)
        version = await follower.caught_up(patience_s)
        return StateReady(member=member, version=version, bytes=follower.sent_bytes, slow=follower.slow)

    def applied(self, step: int, redo: HostCopy) -> None:
        """See `Follower.applied`."""
        for follower in self._followers.values():
            follower.applied(step, redo)

    def end(self, members: Iterable[Member], why: str) -> None:
        """Ends the following of those `members` that follow."""
        for member in members:
            follower = self._followers.pop(member, None)
            if follower is not None:
                follower.end(why)

    def end_all(self, why: str) -> None:
        self.end(list(self._followers), why)
