"""The fence rounds of the open step, and the path updates that follow from their answers. Pure.

Path updates go to new owners first and, once these have acknowledged, to their neighbours (`path_repair`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from entities.orchestrator.transaction.path_repair import PathRepair
from entities.orchestrator.transaction.states import (
    FencingLifecycle,
    FencingState,
    RoundLifecycle,
    RoundState,
)
from entities.orchestrator.transaction.step_events import Assign, Fence
from schemas.step import Member, PathUpdate


@dataclass(slots=True)
class FenceRound(RoundLifecycle):
    """`dispatched`: the gateway had dispatched all before the first answer; else some may be missing."""

    number: int
    step: int
    attempt: int
    fenced: tuple[Member, ...]
    dispatched: bool
    state: RoundState = RoundState.FENCING
    _neighbours: Mapping[Member, tuple[PathUpdate, ...]] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return f"fence round {self.number}"

    def order(self, targets: tuple[Member, ...]) -> Fence:
        return Fence(self.number, self.step, self.attempt, self.fenced, targets)

    def repair(self, paths: PathRepair) -> Assign | None:
        """The first path updates to order; None: there are none, the round is over."""
        owners = {member: tuple(updates) for member, updates in paths.owners.items()}
        self._neighbours = {member: tuple(updates) for member, updates in paths.neighbours.items()}
        if not owners:
            return self.next_assignment()
        self.assign_owners()
        return Assign(self.number, self.step, self.attempt, owners)

    def next_assignment(self) -> Assign | None:
        """The next path updates, now that the last ones are acknowledged; None: the round is over."""
        if self.state is RoundState.ASSIGNING_NEIGHBOURS or not self._neighbours:
            return None
        self.assign_neighbours()
        return Assign(self.number, self.step, self.attempt, self._neighbours)


class Fencing(FencingLifecycle):
    """All rounds of an epoch, of which at most one is open.

    `last_answered`: number of the step's last round that all members have answered; 0: there is none.
    """

    __slots__ = ("_number", "_round", "last_answered")

    def __init__(self) -> None:
        super().__init__(FencingState.QUIET)
        self.last_answered = 0
        self._number = 0
        self._round: FenceRound | None = None

    @property
    def is_due(self) -> bool:
        return self.state in (FencingState.DUE, FencingState.OPEN_AND_DUE)

    @property
    def open_fence(self) -> FenceRound | None:
        """The open round, if there is one."""
        return self._round if self.state in (FencingState.OPEN, FencingState.OPEN_AND_DUE) else None

    @property
    def awaits_answers(self) -> bool:
        """A round is open whose fence not all living members have acknowledged."""
        fence = self.open_fence
        return fence is not None and fence.state is RoundState.FENCING

    def fence(self, number: int) -> FenceRound | None:
        """The open round, if it has this number."""
        fence = self.open_fence
        return fence if fence is not None and fence.number == number else None

    def begin(self, step: int, attempt: int, fenced: tuple[Member, ...], *, dispatched: bool) -> FenceRound:
        """Opens a round that is due."""
        self.open_round()
        self._number += 1
        self._round = FenceRound(self._number, step, attempt, fenced, dispatched)
        return self._round

    def renew(self) -> None:
        """A step or an attempt begins: no round of it was answered."""
        self.abandon_round()
        self.last_answered = 0
