"""A stage's members and their reduction group, as the step machine keeps them (DESIGN §5 rule 8). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from entities.orchestrator.transaction.step_events import Condemn, FormGroup, in_order
from schemas.step import Member

REFORM_S = 0.3
"""Pause before a group is built again that broke without a known death: the death is mostly known then."""
BUILDS = 2
"""Failed builds (or reductions) with the same members before the member with most failed edges is fenced."""


@dataclass(slots=True)
class StageGroup:
    """A stage's voting members, and whether their group is formed; each change starts a new generation."""

    stage: int
    members: tuple[Member, ...]
    generation: int = 0
    formed: bool = False
    preparing: bool = False
    lost_told: bool = False
    _failures: int = 0
    _failed_at: float | None = None
    _silent: set[tuple[Member, Member]] = field(default_factory=set)
    """Failed edges among these members: (witness, silent peer). Repeated reports of an edge count once."""

    @property
    def broken(self) -> bool:
        """The group failed, and is not being built again yet."""
        return self._failed_at is not None

    def regroup(self, members: tuple[Member, ...]) -> None:
        """Starts a new generation with these members."""
        if members != self.members:
            self._failures, self._silent = 0, set()
        self.members = members
        self.generation += 1
        self.formed = self.preparing = False
        self._failed_at = None

    def order(self, step: int, attempt: int, answered: int, dead: Iterable[Member]) -> FormGroup:
        """The order to build the group; `answered`: the step's last round that all members have answered."""
        return FormGroup(self.stage, step, attempt, answered, self.generation, self.members, in_order(dead))

    def failed(self, edges: Iterable[tuple[Member, Member]], now: float) -> Condemn | None:
        """Notes that the present generation could not be built, or that its reduction broke.

        Of two members that find each other silent, the last by name is condemned, in every stage. If a
        partition between two nodes is the cause, all stages then keep their members on the same side.

        Args:
            edges: (witness, silent peer), as named by the members' errors.
            now: seconds.

        Returns:
            The member that can't stay, if there is one.
        """
        self.formed = self.preparing = False
        self._silent.update((witness, peer) for witness, peer in edges if peer in self.members)
        if self.broken:
            return None  # another member reports the same failure
        self._failures += 1
        if self._failures >= BUILDS and len(self.members) > 1:
            blamed = Counter(peer for _, peer in self._silent)
            worst = max(self.members, key=lambda member: (blamed[member], member.sid, member.incarnation))
            return Condemn(worst, f"stage {self.stage}: {self._failures} groups failed with the same members")
        self._failed_at = now
        return None

    def is_due(self, now: float) -> bool:
        """The group broke, and it is time to build it again."""
        return self._failed_at is not None and now - self._failed_at >= REFORM_S and bool(self.members)
