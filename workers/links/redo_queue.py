"""What a peer is still to be sent of a stage's state: a snapshot, then each step since, in order. Pure.

`workers.links.peer_copy` sends it to a holder, `workers.stage.followers` to a newcomer; `tests/sim` runs the
same code.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

QUEUED_REDOS = 4
"""Redos waiting for a slow peer; beyond, they are dropped and a snapshot takes their place. With AdamW a
snapshot is as large as three redos: where more of them wait behind one, steps are faster than redos are."""

Redo = TypeVar("Redo")


class RedoQueue(Generic[Redo]):
    """For one peer. The owner asks for `next` while something is `due`, sends it, and says what arrived."""

    def __init__(self) -> None:
        self.reached: int | None = None
        """The version that the peer was brought to; None: it needs a snapshot."""
        self.overflows = 0
        """How often so many redos waited that a snapshot had to take their place."""
        self._waiting: deque[tuple[int, Redo]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due(self) -> bool:
        return self.reached is None or bool(self._waiting)

    def applied(self, step: int, redo: Redo) -> None:
        """`step` was applied. No redo of it may be missing here, not even that of a step that was skipped."""
        if len(self._waiting) >= QUEUED_REDOS:
            self.afresh()
            self.overflows += 1
        self._waiting.append((step, redo))

    def next(self) -> tuple[int, Redo] | None:
        """The step whose redo is to be sent now; None: a snapshot is."""
        if self.reached is None:
            return None
        step, redo = self._waiting.popleft()
        if step != self.reached:  # some were dropped, or everyone went back to a checkpoint
            self.reached = None
            return None
        return step, redo

    def taken(self, version: int) -> None:
        """A snapshot of `version` was taken, and will be sent: redos of steps before are not needed."""
        while self._waiting and self._waiting[0][0] < version:
            self._waiting.popleft()

    def brought_to(self, version: int, *, redo: bool = False) -> None:
        """The peer has the snapshot of `version`, or the redo of the step before it.

        A redo counts for nothing where one too many has waited meanwhile.
        """
        if not redo or self.reached == version - 1:
            self.reached = version

    def afresh(self) -> None:
        """The peer needs a snapshot, whatever it has."""
        self._waiting.clear()
        self.reached = None
