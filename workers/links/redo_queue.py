"""The queue of state for one peer: first a snapshot, then the redo of each step since, in order. Pure.

`workers.links.peer_copy` uses it for the holder of a replica, `workers.stage.followers` for a newcomer;
`tests/sim` runs the same code.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

QUEUED_REDOS = 4
"""Most redos that wait for a slow peer; one more, and a snapshot replaces them all. With AdamW a snapshot is
as large as three redos: if more wait behind one, steps are faster than the transfer of redos."""

Redo = TypeVar("Redo")


class RedoQueue(Generic[Redo]):
    """The queue for one peer. While it is `due`, the owner calls `next`, sends, and reports what arrived."""

    def __init__(self) -> None:
        self.reached: int | None = None
        """The version that the peer has; None: it needs a snapshot."""
        self.overflows = 0
        """How often too many redos waited, so that a snapshot replaced them."""
        self._waiting: deque[tuple[int, Redo]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due(self) -> bool:
        return self.reached is None or bool(self._waiting)

    def applied(self, step: int, redo: Redo) -> None:
        """Queues the redo of `step`. Every step must be queued, even a skipped one."""
        if len(self._waiting) >= QUEUED_REDOS:
            self.afresh()
            self.overflows += 1
        self._waiting.append((step, redo))

    def next(self) -> tuple[int, Redo] | None:
        """The step and redo to send now; None: a snapshot must be sent."""
        if self.reached is None:
            return None
        step, redo = self._waiting.popleft()
        if step != self.reached:  # redos were dropped, or all members went back to a checkpoint
            self.reached = None
            return None
        return step, redo

    def taken(self, version: int) -> None:
        """Drops the redos of earlier steps: a snapshot of `version` was taken and will be sent."""
        while self._waiting and self._waiting[0][0] < version:
            self._waiting.popleft()

    def brought_to(self, version: int, *, redo: bool = False) -> None:
        """Records that the peer has the snapshot of `version`, or the redo of the step before it.

        A redo is ignored if the queue has overflowed meanwhile.
        """
        if not redo or self.reached == version - 1:
            self.reached = version

    def afresh(self) -> None:
        """Starts over: the peer needs a snapshot, whatever it has."""
        self._waiting.clear()
        self.reached = None
