"""Newcomers of the open step, as the step machine keeps them (DESIGN §5 rule 10). Pure.

They are there, but have no vote: each waits for the state of its stage, or has it on its way.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from entities.orchestrator.stage_group import StageGroup
from entities.orchestrator.step_events import SendState
from schemas.step import Member


class Newcomers:
    """From `arrived` until one has `joined`, or is dropped."""

    def __init__(self) -> None:
        self._stages: dict[Member, int] = {}
        self._sources: dict[Member, Member] = {}  # of those whose state is on its way

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._stages)

    def stage_of(self, newcomer: Member) -> int | None:
        return self._stages.get(newcomer)

    def arrived(self, newcomer: Member, stage: int) -> None:
        self._stages[newcomer] = stage

    def joined(self, member: Member) -> None:
        """It is a member like any other now."""
        self._stages.pop(member, None)

    def drop(self, newcomer: Member) -> Member | None:
        """It does not join; returns who was sending it the state."""
        self._stages.pop(newcomer, None)
        return self._sources.pop(newcomer, None)

    def received(self, newcomer: Member) -> bool:
        """Its transfer is over; False: there was none."""
        return self._sources.pop(newcomer, None) is not None

    def is_receiving(self, stage: int) -> bool:
        """State is on its way to somebody who joins this stage."""
        return any(self._stages.get(member) == stage for member in self._sources)

    def transfers(self, groups: Sequence[StageGroup], dead: Set[Member], step: int) -> list[SendState]:
        """Begins those that can be: from a living member of a stage that does not prepare."""
        begun: list[SendState] = []
        for member, stage in self._stages.items():
            group = groups[stage]
            sources = [one for one in group.members if one not in dead]
            if member not in self._sources and sources and not group.preparing:
                source = sources[(len(self._sources) + 1) % len(sources)]
                self._sources[member] = source
                begun.append(SendState(source, member, step))
        return begun
