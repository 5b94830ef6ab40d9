"""A stage's members and their reduction group, as the step machine keeps them (DESIGN §5 rule 8). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from entities.orchestrator.transaction.step_events import Condemn, FormGroup, in_order
from schemas.step import Member

REFORM_S = 0.3
"""Pause before a group that broke without a known death is built again: the death is mostly known by then."""
BUILDS = 2
"""Failed builds (or reductions) with the same members before the one with most failed edges is fenced."""


@dataclass(slots=True)
class StageGroup:
    """Who has a vote in a stage, and whether their group stands; each change of either is a generation."""

    stage: int
    members: tuple[Member, ...]
    generation: int = 0
    formed: bool = False
    preparing: bool = False
    lost_told: bool = False
    _failures: int = 0
    _failed_at: float | None = None
    _silent: set[tuple[Member, Member]] = field(default_factory=set)
    """Failed edges with these members: who found whom silent. How often tells nothing of the edge."""

    @property
    def broken(self) -> bool:
        """It failed, and is not being built again yet."""
        return self._failed_at is not None

    def regroup(self, members: tuple[Member, ...]) -> None:
        """A new generation, with these members."""
        if members != self.members:
            self._failures, self._silent = 0, set()
        self.members = members
        self.generation += 1
        self.formed = self.preparing = False
        self._failed_at = None

    def order(self, step: int, attempt: int, answered: int, dead: Iterable[Member]) -> FormGroup:
        """What its members are told to build; `answered`: the step's last round that all have answered."""
        return FormGroup(self.stage, step, attempt, answered, self.generation, self.members, in_order(dead))

    def failed(self, edges: Iterable[tuple[Member, Member]], now: float) -> Condemn | None:
        """Its present generation could not be built, or its reduction broke; who can't stay, if anybody.

        Of two that find each other silent it is the last by name, in every stage: where a cut between two
        nodes is behind it, both keep what the other side would have to bring it otherwise.

        Args:
            edges: (witness, whom it found silent), as their errors tell.
            now: seconds.
        """
        self.formed = self.preparing = False
        self._silent.update((witness, peer) for witness, peer in edges if peer in self.members)
        if self.broken:
            return None  # another member tells of the same failure
        self._failures += 1
        if self._failures >= BUILDS and len(self.members) > 1:
            blamed = Counter(peer for _, peer in self._silent)
            worst = max(self.members, key=lambda member: (blamed[member], member.sid, member.incarnation))
            return Condemn(worst, f"stage {self.stage}: {self._failures} groups failed with the same members")
        self._failed_at = now
        return None

    def is_due(self, now: float) -> bool:
        """It broke, and is to be built again by now."""
        return self._failed_at is not None and now - self._failed_at >= REFORM_S and bool(self.members)
