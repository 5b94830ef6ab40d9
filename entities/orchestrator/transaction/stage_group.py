"""A stage's members and their reduction group, as the step machine keeps them (DESIGN §5 rule 8). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from entities.orchestrator.transaction.states import GroupLifecycle, GroupState
from entities.orchestrator.transaction.step_events import Condemn, Effect, FormGroup, in_order
from schemas.step import Member


@dataclass(frozen=True, kw_only=True)
class StageGroupConfig:
    """How a group is built again that broke without a known death."""

    pause_s: float = 0.3
    """Pause before it is built again: a death is mostly known then."""
    builds: int = 2
    """Failed builds, or reductions, in a row with the same members before the one with most failed edges is
    fenced."""


@dataclass(slots=True)
class StageGroup(GroupLifecycle):
    """A stage's voting members, and the state of their group; each change starts a new generation."""

    stage: int
    members: tuple[Member, ...]
    generation: int = 0
    config: StageGroupConfig = StageGroupConfig()
    state: GroupState = field(init=False)
    relaid: bool = False
    """Its layout has changed since it was formed."""
    _failures: int = 0
    _failed_at: float | None = None
    """When this generation failed. If it is formed after all, it is built again all the same."""
    _silent: set[tuple[Member, Member]] = field(default_factory=set)
    """Failed edges among these members: (witness, silent peer). Repeated reports of an edge count once."""

    def __post_init__(self) -> None:
        self.state = GroupState.FORMING if self.members else GroupState.VACANT

    @property
    def subject(self) -> str:
        return f"group of stage {self.stage}"

    def regroup(self, members: tuple[Member, ...]) -> None:
        """Starts a new generation with these members."""
        if members != self.members:
            self.forget_failures()
        self.members = members
        self.generation += 1
        self._failed_at, self.relaid = None, False
        if members:
            self.form()
        else:
            self.vacate()

    def lay_out_anew(self) -> list[Effect]:
        """Its sums are to be reduced in another layout: it is formed anew between two steps."""
        self.relaid = True
        return []

    def must_be_laid_out(self) -> bool:
        """Whether it is to be formed anew now, before a step."""
        return self.relaid and self.state is GroupState.FORMED

    def order(self, step: int, attempt: int, answered: int, dead: Iterable[Member]) -> FormGroup:
        """The order to build the group; `answered`: the step's last round that all members have answered."""
        return FormGroup(self.stage, step, attempt, answered, self.generation, self.members, in_order(dead))

    def forget_failures(self) -> None:
        """Its sums were reduced, or others are in it: what failed before is no part of what may fail next."""
        self._failures, self._silent = 0, set()

    def note_failure(
        self,
        edges: Iterable[tuple[Member, Member]],
        now: float,
        why: str = "",
        answered: Iterable[Member] = (),
    ) -> Condemn | None:
        """Notes that the present generation could not be built, or that its reduction broke.

        Of two members that find each other silent, the last by name is condemned, in every stage. If a
        partition between two nodes is the cause, all stages then keep their members on the same side. Where
        nobody is named as silent it is not who has answered: the others may be dead, and nobody knows yet.

        Args:
            edges: (witness, silent peer), as named by the members' errors.
            now: seconds.
            why: what the member said that reports it.
            answered: the members that have answered, if only with an error.

        Returns:
            The member that can't stay, if there is one.
        """
        self._silent.update((witness, peer) for witness, peer in edges if peer in self.members)
        if self._failed_at is not None:
            self.fail()
            return None  # another member reports the same failure
        self._failures += 1
        if self._failures >= self.config.builds and len(self.members) > 1:
            self.condemn()
            silences = Counter(peer for _, peer in self._silent)
            living = set() if silences else set(answered)

            def badness(member: Member) -> tuple[int, bool, str, str]:
                return silences[member], member not in living, member.sid, member.incarnation

            worst = max(self.members, key=badness)
            failed = f"stage {self.stage}: {self._failures} groups failed with the same members"
            return Condemn(worst, f"{failed}: {why}" if why else failed)
        self.fail()
        self._failed_at = now
        return None

    def is_due(self, now: float) -> bool:
        """The group broke, and it is time to build it again."""
        return self._failed_at is not None and now - self._failed_at >= self.config.pause_s
