"""Newcomers of the open step, as the step machine keeps them (DESIGN §5 rule 10). Pure.

A newcomer has started, but has no vote. It follows a member of its stage, which goes on with its steps
meanwhile; only the last redo, of one step, holds up the stage's prepare. A newcomer that can't keep up is
sent the whole state, and the stage waits for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from entities.orchestrator.transaction.stage_group import StageGroup
from entities.orchestrator.transaction.step_events import AwaitState, SendState
from schemas.errors import IllegalTransition
from schemas.step import Member

LAST_LAG = 1
"""Steps that a newcomer may be behind the open step when its stage's prepare begins to wait for it."""
ASKED = 3
"""How often a newcomer may be found further behind than `LAST_LAG` before it counts as too slow to follow."""


class NewcomerState(StrEnum):
    """How far a newcomer is; the legal transitions are in `STANDINGS`."""

    WAITING = "waiting"
    FOLLOWING = "following"
    LAST_REDO = "last redo"
    WHOLE = "whole state"
    PAUSED = "paused"


STANDINGS: dict[NewcomerState, frozenset[NewcomerState]] = {
    NewcomerState.WAITING: frozenset({NewcomerState.FOLLOWING, NewcomerState.WHOLE}),
    NewcomerState.FOLLOWING: frozenset(
        {NewcomerState.LAST_REDO, NewcomerState.WAITING, NewcomerState.PAUSED}
    ),
    NewcomerState.LAST_REDO: frozenset(
        {NewcomerState.FOLLOWING, NewcomerState.WAITING, NewcomerState.PAUSED}
    ),
    NewcomerState.WHOLE: frozenset({NewcomerState.WAITING, NewcomerState.PAUSED}),
    NewcomerState.PAUSED: frozenset({NewcomerState.WAITING}),
}
"""Waiting: nobody sends it anything. Following: it is sent a snapshot, then redos. Last redo and whole state:
its stage does not prepare meanwhile. Paused: a transfer failed, and is tried again in a moment. A newcomer
joins from one of the two states that hold its stage up; it may be lost in each state."""
HOLDING = (NewcomerState.LAST_REDO, NewcomerState.WHOLE)


@dataclass(slots=True)
class Newcomer:
    """One newcomer. `transfer`: number of its present transfer; `version`: last one reported (−1: none)."""

    stage: int
    standing: NewcomerState = NewcomerState.WAITING
    source: Member | None = None
    transfer: int = 0
    version: int = -1
    asked: int = 0

    def enter(self, standing: NewcomerState) -> None:
        if standing not in STANDINGS[self.standing]:
            raise IllegalTransition(f"newcomer of stage {self.stage}: {self.standing} → {standing}")
        self.standing = standing

    def forget(self, standing: NewcomerState = NewcomerState.WAITING) -> None:
        """Enters `standing` and drops its transfer: nothing that is still on its way to it counts."""
        self.enter(standing)
        self.source, self.transfer, self.version, self.asked = None, 0, -1, 0


class Newcomers:
    """All newcomers of the open step, each from `arrived` until it has `joined` or is dropped."""

    def __init__(self) -> None:
        self._newcomers: dict[Member, Newcomer] = {}
        self._slow: set[Member] = set()

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._newcomers)

    def stage_of(self, newcomer: Member) -> int | None:
        entry = self._newcomers.get(newcomer)
        return None if entry is None else entry.stage

    def transfer_of(self, newcomer: Member) -> int:
        """The number of its transfer; 0: it has none."""
        entry = self._newcomers.get(newcomer)
        return 0 if entry is None else entry.transfer

    def arrived(self, newcomer: Member, stage: int) -> None:
        entry = self._newcomers.setdefault(newcomer, Newcomer(stage))
        if entry.standing is NewcomerState.PAUSED:
            entry.enter(NewcomerState.WAITING)

    def joined(self, member: Member) -> None:
        """Forgets the newcomer: it is a member like any other now."""
        self._newcomers.pop(member, None)
        self._slow.discard(member)

    def drop(self, newcomer: Member) -> Member | None:
        """Forgets the newcomer: it does not join. Returns the member that was sending it the state."""
        self._slow.discard(newcomer)
        entry = self._newcomers.pop(newcomer, None)
        return None if entry is None else entry.source

    def failed(self, newcomer: Member, transfer: int) -> None:
        """Pauses the newcomer whose transfer failed; the shell reports it as arrived again after a moment."""
        entry = self._newcomers.get(newcomer)
        if entry is not None and entry.transfer == transfer:
            if entry.standing is NewcomerState.LAST_REDO:
                self._slow.add(newcomer)  # the step waited in vain: it gets the whole state next time
            entry.forget(NewcomerState.PAUSED)

    def followed(self, newcomer: Member, transfer: int, version: int, *, slow: bool) -> None:
        """Notes that it has reached `version`, where its source was then; `slow`: it can't keep up."""
        entry = self._newcomers.get(newcomer)
        if entry is None or entry.transfer != transfer or entry.standing is not NewcomerState.FOLLOWING:
            return
        entry.version = version
        if slow:
            self._slow.add(newcomer)
            entry.forget()

    def reached(self, newcomer: Member, transfer: int, version: int) -> int | None:
        """Notes that it holds `version`; returns the stage that it can join, None if none waits for it."""
        entry = self._newcomers.get(newcomer)
        if entry is None or entry.transfer != transfer or entry.standing not in HOLDING:
            return None
        if entry.standing is NewcomerState.LAST_REDO:
            entry.enter(NewcomerState.FOLLOWING)
            entry.version = version
        else:
            entry.forget()
        return entry.stage

    def forsaken(self, dead: Set[Member], groups: Sequence[StageGroup]) -> None:
        """Makes newcomers wait for another source whose source is dead, where their stage has another one.

        Where it has none, the transfer may still arrive from the lost source, and bring the stage back.
        """
        for newcomer in self._newcomers.values():
            members = groups[newcomer.stage].members
            if newcomer.source in dead and any(member not in dead for member in members):
                newcomer.forget()

    def is_receiving(self, stage: int) -> bool:
        """The stage's prepare has to wait for a state that is on its way to a newcomer."""
        newcomers = self._newcomers.values()
        return any(newcomer.stage == stage and newcomer.standing in HOLDING for newcomer in newcomers)

    def transfers(
        self, groups: Sequence[StageGroup], dead: Set[Member], step: int, numbers: Iterator[int]
    ) -> list[SendState | AwaitState]:
        """Begins transfers, and asks for last redos; a stage that already prepares is not made to wait.

        Args:
            groups: the groups, by stage.
            dead: members that must not be a source.
            step: the open step.
            numbers: numbers for new transfers.
        """
        orders: list[SendState | AwaitState] = []
        for member, newcomer in self._newcomers.items():
            group = groups[newcomer.stage]
            if newcomer.standing is NewcomerState.FOLLOWING and newcomer.version >= 0 and not group.preparing:
                orders += self._go_on(member, newcomer, step)
            if newcomer.standing is NewcomerState.WAITING:
                sources = [other for other in group.members if other not in dead]
                if sources and not (member in self._slow and group.preparing):
                    orders.append(self._send(member, newcomer, sources, step, next(numbers)))
        return orders

    def _send(
        self, member: Member, newcomer: Newcomer, sources: Sequence[Member], step: int, number: int
    ) -> SendState:
        busy = sum(other.source is not None for other in self._newcomers.values())
        newcomer.enter(NewcomerState.WHOLE if member in self._slow else NewcomerState.FOLLOWING)
        newcomer.source, newcomer.transfer = sources[(busy + 1) % len(sources)], number
        return SendState(newcomer.source, member, step, number, follow=member not in self._slow)

    def _go_on(self, member: Member, newcomer: Newcomer, step: int) -> list[SendState | AwaitState]:
        """The next order for a newcomer that has reported its version: last redo, or on with following."""
        assert newcomer.source is not None
        if step - newcomer.version <= LAST_LAG:
            newcomer.enter(NewcomerState.LAST_REDO)
            return [AwaitState(member, step, newcomer.transfer)]
        newcomer.asked += 1
        if newcomer.asked == ASKED:
            self._slow.add(member)
            newcomer.forget()
            return []
        newcomer.version = -1  # the report came too late: the newcomer may have caught up by now
        return [SendState(newcomer.source, member, step, newcomer.transfer, follow=True)]
