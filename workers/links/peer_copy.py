"""A stage's copy at a peer (DESIGN §5 rule 9): snapshots, and each step's gradient as redo.

The *source* sends a whole snapshot now and then and, after each step, the clipped mean gradients that it has
just applied, beside the training. The *holder*, an instance of another stage or a data instance, keeps the
newest whole snapshot and the redos after it in host memory. A newcomer that takes both over in order has
the source's bits, for an optimizer step is a pure function of state, gradient and step.
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
"""Steps between snapshots. A holder keeps three times the stage's parameters (AdamW) and once more per step
since the snapshot; a rarer one costs memory and time to catch up, a more frequent one bandwidth."""
HELD_REDOS = 2 * SNAPSHOT_EVERY
"""Redos that a holder keeps: a source that never sends the next snapshot must not fill its memory."""

CopyDirection = Literal["copy", "redo"]
SendCopy = Callable[[Member, CopyDirection, int, Sequence[Tensor]], Awaitable[Outcome]]
"""(holder, direction, step, tensors): over the exchange."""
Snapshot = Callable[[], Awaitable[tuple[int, list[Tensor]]]]
"""The version, and tensors in host memory that nobody changes any more."""


class CopySource:
    """What a stage instance sends to its holder. Owned by the event loop."""

    def __init__(self, send: SendCopy, snapshot: Snapshot) -> None:
        self.holder: Member | None = None
        self._send = send
        self._snapshot = snapshot
        self._queue: RedoQueue[HostCopy] = RedoQueue()
        self._since = 0
        self._leaving: list[Member] = []
        self._task: asyncio.Task[None] | None = None

    def keep_at(self, holder: Member | None) -> None:
        """The copy is kept at `holder` from now on; the one before forgets it. Idempotent."""
        if holder == self.holder:
            return
        if self.holder is not None:
            self._leaving.append(self.holder)
        self.holder = holder
        self._queue.afresh()
        self._stop()  # the send that is on its way may be to one that is dead
        self._start()

    def applied(self, step: int, gradients: HostCopy) -> None:
        """`step` was applied with these clipped mean gradients, in parameter order; none: it was skipped."""
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
        """Sends what there is, in order; what fails is made good by a snapshot after the next step."""
        try:
            while self._due or self._leaving:
                if not self._due:
                    await self._tell(self._leaving.pop(), "copy", 0, ())
                elif self.holder is not None and not await self._next(self.holder):
                    self._queue.afresh()
                    return
        except Exception as error:  # the copy is a precaution: the stage itself goes on
            log.error("peer copy", exc_info=error)
            self._queue.afresh()

    @property
    def _due(self) -> bool:
        return self.holder is not None and self._queue.due

    async def _next(self, holder: Member) -> bool:
        redo = self._queue.next() if self._since < SNAPSHOT_EVERY else None
        if redo is None:
            version, tensors = await self._snapshot()
            self._queue.taken(version)
            if not await self._tell(holder, "copy", version, tensors):
                return False
            self._queue.brought_to(version)
            self._since = 0
            return True
        step, gradients = redo
        if not await self._tell(holder, "redo", step, await gradients.there()):
            return False
        self._queue.brought_to(step + 1, redo=True)
        self._since += 1
        return True

    async def _tell(self, to: Member, direction: CopyDirection, step: int, tensors: Sequence[Tensor]) -> bool:
        try:
            return await self._send(to, direction, step, tensors) == "delivered"
        except DmscError as error:  # its death is told by others; a new holder will be named
            log.info("peer copy not sent", to=to.sid, direction=direction, step=step, reason=error.text)
            return False


@dataclass(slots=True)
class HeldCopy:
    """A snapshot of `version`, then one redo per step from there on (an empty one was skipped)."""

    version: int
    tensors: Sequence[Tensor]
    redos: list[Sequence[Tensor]] = field(default_factory=list)

    @property
    def reach(self) -> int:
        """The version that it comes to when all redos are applied."""
        return self.version + len(self.redos)


class ReplicaBuffer:
    """What an instance holds for other stages, by stage."""

    def __init__(self) -> None:
        self._held: dict[int, HeldCopy] = {}

    def snapshot(self, stage: int, version: int, tensors: Sequence[Tensor]) -> None:
        """A whole snapshot is here: it takes the place of what was held. Without tensors: forget it."""
        if tensors:
            self._held[stage] = HeldCopy(version, tensors)
        else:
            self._held.pop(stage, None)

    def redo(self, stage: int, step: int, gradients: Sequence[Tensor]) -> None:
        """The gradients of `step`. Behind a gap, or beyond the bound, the copy is useless and goes."""
        held = self._held.get(stage)
        if held is None or step < held.reach:
            return
        if step > held.reach or len(held.redos) >= HELD_REDOS:
            del self._held[stage]
            return
        held.redos.append(gradients)

    def reach(self, stage: int) -> int:
        """The version that the copy of `stage` reaches; -1: none is held."""
        held = self._held.get(stage)
        return -1 if held is None else held.reach

    def get(self, stage: int, version: int) -> HeldCopy | None:
        """What brings a newcomer to exactly `version`, as it is now; None if that can't be."""
        held = self._held.get(stage)
        if held is None or held.reach != version:
            return None
        return HeldCopy(held.version, held.tensors, list(held.redos))
