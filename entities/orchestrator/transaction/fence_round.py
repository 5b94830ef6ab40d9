"""One fence of the open step, and the path updates that follow from its answers. Pure.

Path updates go to new owners first and, once these have acknowledged, to their neighbours (`path_repair`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from entities.orchestrator.transaction.path_repair import PathRepair
from entities.orchestrator.transaction.step_events import Assign, Fence
from schemas.step import Member, PathUpdate


@dataclass(slots=True)
class FenceRound:
    """`dispatched`: the gateway had dispatched all before the first answer; else some may be missing."""

    number: int
    step: int
    attempt: int
    fenced: tuple[Member, ...]
    dispatched: bool
    _neighbours: Mapping[Member, tuple[PathUpdate, ...]] | None = None
    _owners_ordered: bool = False

    @property
    def answered(self) -> bool:
        """All living members have said what they hold, so that the path updates are known."""
        return self._neighbours is not None

    def order(self, targets: tuple[Member, ...]) -> Fence:
        return Fence(self.number, self.step, self.attempt, self.fenced, targets)

    def mended(self, mending: PathRepair) -> Assign | None:
        """The first path updates to order; None: there are none, the round is over."""
        owners = {member: tuple(paths) for member, paths in mending.owners.items()}
        self._neighbours = {member: tuple(paths) for member, paths in mending.neighbours.items()}
        return Assign(self.number, self.step, self.attempt, owners) if owners else self.assigned()

    def assigned(self) -> Assign | None:
        """The next path updates, now that the last ones are acknowledged; None: the round is over."""
        if self._owners_ordered or not self._neighbours:
            return None
        self._owners_ordered = True
        return Assign(self.number, self.step, self.attempt, self._neighbours)
