"""How the gradients of a stage's replicas are reduced, where that was suggested (ADR-0101). Pure.

Sums are of integers, so that no bit depends on it. All members of a generation must know the same layout: so
a generation keeps the one that it was first formed with, and another one needs another generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.step import Member


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionLayout:
    """Relative sizes of the parts by SID, 1 where one is missing, and the order of the ring."""

    parts: Mapping[str, float] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def ordered(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """The members in this order; those that it does not name come last, as they were."""
        if not self.order:
            return tuple(members)
        place = {sid: number for number, sid in enumerate(self.order)}
        return tuple(sorted(members, key=lambda member: place.get(member.sid, len(place))))

    def sizes(self, members: Sequence[Member]) -> tuple[float, ...]:
        """The relative size of each member's part; empty: they are equal."""
        sizes = tuple(self.parts.get(member.sid, 1.0) for member in members)
        return () if len(set(sizes)) < 2 else sizes


EVEN = ReductionLayout()


class ReductionLayouts:
    """The layouts of a job's stages: those that are wanted, and those of the present generations."""

    def __init__(self) -> None:
        self.wanted: dict[int, ReductionLayout] = {}
        self.on_change: Callable[[int], None] = lambda stage: None
        """Called with a stage that is to have another layout."""
        self._formed: dict[int, tuple[int, ReductionLayout]] = {}  # stage → generation and its layout

    def of(self, stage: int, generation: int) -> ReductionLayout:
        """The layout with which this generation of a stage is formed."""
        known = self._formed.get(stage)
        if known is None or known[0] != generation:
            known = self._formed[stage] = (generation, self.wanted.get(stage, EVEN))
        return known[1]

    def want(self, stage: int, layout: ReductionLayout) -> None:
        """From its next generation on, the stage has this layout."""
        self.wanted[stage] = layout
        self.on_change(stage)
