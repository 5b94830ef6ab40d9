"""Newcomers of the open step, as the step machine keeps them (DESIGN §5 rule 10). Pure.

They are there, but have no vote. Each follows a member of its stage, which goes on with its steps meanwhile;
only the last redo, of one step, holds up the stage's prepare. A newcomer that can't keep up is sent the state
as it is, and the stage waits for all of it.
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
"""Steps that a newcomer may be behind the open one when its stage's prepare begins to wait for it."""
ASKED = 3
"""How often a newcomer may be found further behind than that before it counts as too slow to follow."""


class NewcomerState(StrEnum):
    """How far a newcomer is."""

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
"""Waiting: nobody sends it anything. Following: it is sent a snapshot, then redos. Last redo, and whole
state: its stage does not prepare. Paused: that failed, and is tried again in a moment. A newcomer joins from
one of the two that hold the stage up; it may be lost in each."""
HOLDING = (NewcomerState.LAST_REDO, NewcomerState.WHOLE)


@dataclass(slots=True)
class Newcomer:
    """`transfer` numbers what it is sent now; `version`: what it was brought to, as far as told (−1: not)."""

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
        """Nothing that is on its way to it counts."""
        self.enter(standing)
        self.source, self.transfer, self.version, self.asked = None, 0, -1, 0


class Newcomers:
    """From `arrived` until one has `joined`, or is dropped."""

    def __init__(self) -> None:
        self._newcomers: dict[Member, Newcomer] = {}
        self._slow: set[Member] = set()

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._newcomers)

    def stage_of(self, newcomer: Member) -> int | None:
        found = self._newcomers.get(newcomer)
        return None if found is None else found.stage

    def transfer_of(self, newcomer: Member) -> int:
        """The number of what it is being sent; 0: nothing."""
        found = self._newcomers.get(newcomer)
        return 0 if found is None else found.transfer

    def arrived(self, newcomer: Member, stage: int) -> None:
        found = self._newcomers.setdefault(newcomer, Newcomer(stage))
        if found.standing is NewcomerState.PAUSED:
            found.enter(NewcomerState.WAITING)

    def joined(self, member: Member) -> None:
        """It is a member like any other now."""
        self._newcomers.pop(member, None)
        self._slow.discard(member)

    def drop(self, newcomer: Member) -> Member | None:
        """It does not join; returns who was sending it the state."""
        self._slow.discard(newcomer)
        found = self._newcomers.pop(newcomer, None)
        return None if found is None else found.source

    def failed(self, newcomer: Member, transfer: int) -> None:
        """What it was being sent does not arrive. It is to be told of as arrived again, after a pause."""
        found = self._newcomers.get(newcomer)
        if found is not None and found.transfer == transfer:
            if (
                found.standing is NewcomerState.LAST_REDO
            ):  # a step waited in vain: the next one waits for all of it
                self._slow.add(newcomer)
            found.forget(NewcomerState.PAUSED)

    def followed(self, newcomer: Member, transfer: int, version: int, *, slow: bool) -> None:
        """It was brought to `version`, where its source was then; `slow`: it can't keep up with it."""
        found = self._newcomers.get(newcomer)
        if found is None or found.transfer != transfer or found.standing is not NewcomerState.FOLLOWING:
            return
        found.version = version
        if slow:
            self._slow.add(newcomer)
            found.forget()

    def reached(self, newcomer: Member, transfer: int, version: int) -> int | None:
        """It holds `version`: the stage that it can join with that, or None if it is not awaited there."""
        found = self._newcomers.get(newcomer)
        if found is None or found.transfer != transfer or found.standing not in HOLDING:
            return None
        if found.standing is NewcomerState.LAST_REDO:
            found.enter(NewcomerState.FOLLOWING)
            found.version = version
        else:
            found.forget()
        return found.stage

    def forsaken(self, dead: Set[Member], groups: Sequence[StageGroup]) -> None:
        """Those that were sent the state by one of the dead wait for another source, where there is one.

        Where there is none, what is on its way may arrive all the same, and bring the stage back.
        """
        for newcomer in self._newcomers.values():
            if newcomer.source in dead and any(one not in dead for one in groups[newcomer.stage].members):
                newcomer.forget()

    def is_receiving(self, stage: int) -> bool:
        """The stage's prepare waits for a state that is on its way to somebody."""
        return any(one.stage == stage and one.standing in HOLDING for one in self._newcomers.values())

    def transfers(
        self, groups: Sequence[StageGroup], dead: Set[Member], step: int, numbers: Iterator[int]
    ) -> list[SendState | AwaitState]:
        """Begins or ends those that can be; a stage that prepares already is not made to wait.

        Args:
            groups: by stage.
            dead: nobody is a source among them.
            step: the open one.
            numbers: of transfers.
        """
        begun: list[SendState | AwaitState] = []
        for member, newcomer in self._newcomers.items():
            group = groups[newcomer.stage]
            if newcomer.standing is NewcomerState.FOLLOWING and newcomer.version >= 0 and not group.preparing:
                begun += self._go_on(member, newcomer, step)
            if newcomer.standing is NewcomerState.WAITING:
                sources = [one for one in group.members if one not in dead]
                if sources and not (member in self._slow and group.preparing):
                    begun.append(self._send(member, newcomer, sources, step, next(numbers)))
        return begun

    def _send(
        self, member: Member, newcomer: Newcomer, sources: Sequence[Member], step: int, number: int
    ) -> SendState:
        busy = sum(one.source is not None for one in self._newcomers.values())
        newcomer.enter(NewcomerState.WHOLE if member in self._slow else NewcomerState.FOLLOWING)
        newcomer.source, newcomer.transfer = sources[(busy + 1) % len(sources)], number
        return SendState(newcomer.source, member, step, number, follow=member not in self._slow)

    def _go_on(self, member: Member, newcomer: Newcomer, step: int) -> list[SendState | AwaitState]:
        """Where a newcomer that had caught up is found to be."""
        assert newcomer.source is not None
        if step - newcomer.version <= LAST_LAG:
            newcomer.enter(NewcomerState.LAST_REDO)
            return [AwaitState(member, step, newcomer.transfer)]
        newcomer.asked += 1
        if newcomer.asked == ASKED:
            self._slow.add(member)
            newcomer.forget()
            return []
        newcomer.version = -1  # that was told too late: it may be there by now
        return [SendState(newcomer.source, member, step, newcomer.transfer, follow=True)]
