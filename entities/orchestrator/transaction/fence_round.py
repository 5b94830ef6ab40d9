"""One fence of the open step and the mending that follows from it, as the step machine keeps it. Pure.

Paths go to new owners first and, once these have acknowledged, to their neighbours (see `path_mending`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from entities.orchestrator.transaction.path_repair import PathRepair
from entities.orchestrator.transaction.step_events import Assign, Fence
from schemas.step import Member, PathUpdate


@dataclass(slots=True)
class FenceRound:
    """`dispatched`: the gateway was done before anybody answered; else one may hold more than it told."""

    number: int
    step: int
    attempt: int
    fenced: tuple[Member, ...]
    dispatched: bool
    _neighbours: Mapping[Member, tuple[PathUpdate, ...]] | None = None
    _told_owners: bool = False

    @property
    def answered(self) -> bool:
        """All that live have told what they hold, and paths are mended by it."""
        return self._neighbours is not None

    def order(self, targets: tuple[Member, ...]) -> Fence:
        return Fence(self.number, self.step, self.attempt, self.fenced, targets)

    def mended(self, mending: PathRepair) -> Assign | None:
        """What is to be told first; None: nothing, the round is over."""
        owners = {member: tuple(paths) for member, paths in mending.owners.items()}
        self._neighbours = {member: tuple(paths) for member, paths in mending.neighbours.items()}
        return Assign(self.number, self.step, self.attempt, owners) if owners else self.assigned()

    def assigned(self) -> Assign | None:
        """The last ones have been told; what is to be told next; None: the round is over."""
        if self._told_owners or not self._neighbours:
            return None
        self._told_owners = True
        return Assign(self.number, self.step, self.attempt, self._neighbours)
