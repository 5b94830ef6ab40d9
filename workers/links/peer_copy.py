"""A replica of a stage's state at a peer (DESIGN §5 rule 9): snapshots, and each step's gradient as a redo.

The *source* sends a whole snapshot every `SNAPSHOT_EVERY` steps and, after each step, the clipped mean
gradients that it has just applied, while training goes on. The *holder*, an instance of another stage or a
data instance, keeps the newest snapshot and the redos after it in host memory. A newcomer that applies both
in order has the source's bits, since an optimizer step is a pure function of state, gradient and step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from bus.logs import get_logger
from schemas.errors import DmscError
from schemas.step import Member
from workers.links.hop_exchange import Outcome
from workers.links.redo_queue import RedoQueue
from workers.transport.pinned_buffers import HostCopy

log = get_logger("instance")

SNAPSHOT_EVERY = 16
"""Steps between snapshots. A holder keeps three times the stage's parameters (AdamW), plus once more per step
since the snapshot. A larger value costs memory and time to catch up, a smaller one bandwidth."""
HELD_REDOS = 2 * SNAPSHOT_EVERY
"""Most redos that a holder keeps: a source that never sends the next snapshot must not fill its memory."""

CopyDirection = Literal["copy", "redo"]
SendCopy = Callable[[Member, CopyDirection, int, Sequence[Tensor], float | None], Awaitable[Outcome]]
"""Sends over the exchange: (holder, direction, step, tensors, learning rate of a redo)."""
Snapshot = Callable[[], Awaitable[tuple[int, list[Tensor]]]]
"""Returns the version, and tensors in host memory that are not changed any more."""


class CopySource:
    """Sends a stage's state to its holder. Owned by the event loop."""

    def __init__(self, send: SendCopy, snapshot: Snapshot) -> None:
        self.holder: Member | None = None
        self._send = send
        self._snapshot = snapshot
        self._queue: RedoQueue[HostCopy] = RedoQueue()
        self._since = 0
        self._former_holders: list[Member] = []
        self._task: asyncio.Task[None] | None = None

    def keep_at(self, holder: Member | None) -> None:
        """Keeps the replica at `holder` from now on; the former holder drops it. Idempotent."""
        if holder == self.holder:
            return
        if self.holder is not None:
            self._former_holders.append(self.holder)
        self.holder = holder
        self._queue.afresh()
        self._stop()  # the send under way may be to a dead holder
        self._start()

    def applied(self, step: int, gradients: HostCopy) -> None:
        """Queues `step` with its clipped mean gradients, in parameter order; no gradients: a skipped step."""
        if self.holder is None:
            return
        self._queue.applied(step, gradients)
        self._start()

    def close(self) -> None:
        self.holder = None
        self._queue.afresh()
        self._stop()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._pump(), name="peer copy")

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _pump(self) -> None:
        """Sends what is due, in order; after a failure, a snapshot follows the next step."""
        try:
            while self._due or self._former_holders:
                if not self._due:
                    await self._deliver(self._former_holders.pop(), "copy", 0, ())
                elif self.holder is not None and not await self._next(self.holder):
                    self._queue.afresh()
                    return
        except Exception as error:  # the replica is a precaution: the stage itself goes on
            log.error("peer copy failed", exc_info=error)
            self._queue.afresh()

    @property
    def _due(self) -> bool:
        return self.holder is not None and self._queue.due

    async def _next(self, holder: Member) -> bool:
        redo = self._queue.next() if self._since < SNAPSHOT_EVERY else None
        if redo is None:
            version, tensors = await self._snapshot()
            self._queue.taken(version)
            if not await self._deliver(holder, "copy", version, tensors):
                return False
            self._queue.brought_to(version)
            self._since = 0
            return True
        step, gradients = redo
        present, rate = await gradients.there(), gradients.learning_rate
        if not await self._deliver(holder, "redo", step, present, rate):
            return False
        self._queue.brought_to(step + 1, redo=True)
        self._since += 1
        return True

    async def _deliver(
        self,
        to: Member,
        direction: CopyDirection,
        step: int,
        tensors: Sequence[Tensor],
        learning_rate: float | None = None,
    ) -> bool:
        try:
            return await self._send(to, direction, step, tensors, learning_rate) == "delivered"
        except DmscError as error:  # others report its death; the orchestrator will name a new holder
            log.info("peer copy not sent", to=to.sid, direction=direction, step=step, reason=error.text)
            return False


@dataclass(frozen=True, slots=True)
class HeldRedo:
    """The clipped mean gradients of a step and its learning rate; no gradients: a skipped step."""

    gradients: Sequence[Tensor]
    learning_rate: float | None = None


@dataclass(slots=True)
class HeldCopy:
    """A snapshot of `version`, then one redo per step from there on (an empty redo is a skipped step)."""

    version: int
    tensors: Sequence[Tensor]
    redos: list[HeldRedo] = field(default_factory=list)

    @property
    def reach(self) -> int:
        """The version that it reaches when all redos are applied."""
        return self.version + len(self.redos)


class ReplicaBuffer:
    """The replicas of other stages' state that an instance keeps, by stage."""

    def __init__(self) -> None:
        self._replicas: dict[int, HeldCopy] = {}

    def snapshot(self, stage: int, version: int, tensors: Sequence[Tensor]) -> None:
        """Replaces the replica by a whole snapshot; drops it if there are no tensors."""
        if tensors:
            self._replicas[stage] = HeldCopy(version, tensors)
        else:
            self._replicas.pop(stage, None)

    def redo(
        self, stage: int, step: int, gradients: Sequence[Tensor], learning_rate: float | None = None
    ) -> None:
        """Appends the gradients of `step`; drops the replica after a gap or beyond the bound."""
        replica = self._replicas.get(stage)
        if replica is None or step < replica.reach:
            return
        if step > replica.reach or len(replica.redos) >= HELD_REDOS:
            del self._replicas[stage]
            return
        replica.redos.append(HeldRedo(gradients, learning_rate))

    def clear(self) -> None:
        """Drops all replicas: stages have other layers now."""
        self._replicas.clear()

    def reach(self, stage: int) -> int:
        """The version that the replica of `stage` reaches; -1: there is none."""
        replica = self._replicas.get(stage)
        return -1 if replica is None else replica.reach

    def get(self, stage: int, version: int) -> HeldCopy | None:
        """A replica that brings a newcomer to exactly `version`; None if there is none."""
        replica = self._replicas.get(stage)
        if replica is None or replica.reach != version:
            return None
        return HeldCopy(replica.version, replica.tensors, list(replica.redos))
