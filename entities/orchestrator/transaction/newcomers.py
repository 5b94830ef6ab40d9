"""Newcomers of the open step, as the step machine keeps them (DESIGN §5 rule 10). Pure.

A newcomer has started, but has no vote. It follows a member of its stage, which goes on with its steps
meanwhile; only the last redo, of one step, holds up the stage's prepare. A newcomer that can't keep up is
sent the whole state, and the stage waits for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from entities.orchestrator.transaction.stage_group import StageGroup
from entities.orchestrator.transaction.states import GroupState, NewcomerLifecycle, NewcomerState
from entities.orchestrator.transaction.step_events import AwaitState, SendState
from schemas.step import Member

LAST_LAG = 1
"""Steps that a newcomer may be behind the open step when its stage's prepare begins to wait for it."""
LATE_REPORTS = 3
"""How often a newcomer may be found further behind than `LAST_LAG` before it counts as too slow to follow."""

HOLDING = (NewcomerState.LAST_REDO, NewcomerState.WHOLE)
"""The states that hold the stage's prepare up."""
UNSERVED = (NewcomerState.WAITING, NewcomerState.SLOW)
PAUSING = (NewcomerState.PAUSED, NewcomerState.SLOW_PAUSED)


@dataclass(slots=True)
class Newcomer(NewcomerLifecycle):
    """One newcomer. `transfer`: number of its present transfer; `version`: last one reported (−1: none)."""

    stage: int
    state: NewcomerState = NewcomerState.WAITING
    source: Member | None = None
    transfer: int = 0
    version: int = -1
    late_reports: int = 0

    @property
    def subject(self) -> str:
        return f"newcomer of stage {self.stage}"

    def drop_transfer(self) -> None:
        """From here on nothing that is still on its way to it counts."""
        self.source, self.transfer, self.version, self.late_reports = None, 0, -1, 0


class Newcomers:
    """All newcomers of the open step, each from `arrived` until it has `joined` or is dropped."""

    def __init__(self) -> None:
        self._newcomers: dict[Member, Newcomer] = {}

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
        if entry.state in PAUSING:
            entry.resume()

    def joined(self, member: Member) -> None:
        """Forgets the newcomer: it is a member like any other now."""
        self._newcomers.pop(member, None)

    def drop(self, newcomer: Member) -> Member | None:
        """Forgets the newcomer: it does not join. Returns the member that was sending it the state."""
        entry = self._newcomers.pop(newcomer, None)
        return None if entry is None else entry.source

    def failed(self, newcomer: Member, transfer: int) -> None:
        """Pauses the newcomer whose transfer failed; the shell reports it as arrived again after a moment."""
        entry = self._newcomers.get(newcomer)
        if entry is not None and entry.transfer == transfer:
            entry.fail_transfer()
            entry.drop_transfer()

    def followed(self, newcomer: Member, transfer: int, version: int, *, slow: bool) -> None:
        """Notes that it has reached `version`, where its source was then; `slow`: it can't keep up."""
        entry = self._newcomers.get(newcomer)
        if entry is None or entry.transfer != transfer or entry.state is not NewcomerState.FOLLOWING:
            return
        entry.version = version
        if slow:
            entry.fall_behind()
            entry.drop_transfer()

    def reached(self, newcomer: Member, transfer: int, version: int) -> int | None:
        """Notes that it holds `version`; returns the stage that it can join, None if none waits for it."""
        entry = self._newcomers.get(newcomer)
        if entry is None or entry.transfer != transfer or entry.state not in HOLDING:
            return None
        entry.reach_version()
        if entry.state is NewcomerState.FOLLOWING:
            entry.version = version
        else:
            entry.drop_transfer()
        return entry.stage

    def lose_sources(self, dead: Set[Member], groups: Sequence[StageGroup]) -> None:
        """Makes newcomers wait for another source whose source is dead, where their stage has another one.

        Where it has none, the transfer may still arrive from the lost source, and bring the stage back.
        """
        for newcomer in self._newcomers.values():
            members = groups[newcomer.stage].members
            if newcomer.source in dead and any(member not in dead for member in members):
                newcomer.lose_source()
                newcomer.drop_transfer()

    def is_receiving(self, stage: int) -> bool:
        """The stage's prepare has to wait for a state that is on its way to a newcomer."""
        newcomers = self._newcomers.values()
        return any(newcomer.stage == stage and newcomer.state in HOLDING for newcomer in newcomers)

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
            prepares = group.state is GroupState.PREPARING
            if newcomer.state is NewcomerState.FOLLOWING and newcomer.version >= 0 and not prepares:
                orders += self._go_on(member, newcomer, step)
            if newcomer.state in UNSERVED:
                sources = [other for other in group.members if other not in dead]
                if sources and not (newcomer.state is NewcomerState.SLOW and prepares):
                    orders.append(self._send(member, newcomer, sources, step, next(numbers)))
        return orders

    def _send(
        self, member: Member, newcomer: Newcomer, sources: Sequence[Member], step: int, number: int
    ) -> SendState:
        busy = sum(other.source is not None for other in self._newcomers.values())
        if newcomer.state is NewcomerState.SLOW:
            newcomer.receive_whole_state()
        else:
            newcomer.follow()
        follows = newcomer.state is NewcomerState.FOLLOWING
        newcomer.source, newcomer.transfer = sources[(busy + 1) % len(sources)], number
        return SendState(newcomer.source, member, step, number, follow=follows)

    def _go_on(self, member: Member, newcomer: Newcomer, step: int) -> list[SendState | AwaitState]:
        """The next order for a newcomer that has reported its version: last redo, or on with following."""
        assert newcomer.source is not None
        if step - newcomer.version <= LAST_LAG:
            newcomer.await_last_redo()
            return [AwaitState(member, step, newcomer.transfer)]
        newcomer.late_reports += 1
        if newcomer.late_reports == LATE_REPORTS:
            newcomer.fall_behind()
            newcomer.drop_transfer()
            return []
        newcomer.version = -1  # the report came too late: the newcomer may have caught up by now
        return [SendState(newcomer.source, member, step, newcomer.transfer, follow=True)]
