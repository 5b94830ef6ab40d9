"""The cut of a mending: what an instance told of the open step, and what came after it (DESIGN §5 rule 1).

Instances answer a fence at different moments, and microbatches go on meanwhile between those that live. The
orchestrator's picture is whole only if no answer shows the effect of something that another answer does not
show yet. So an offer carries the round of its sender's last answer, and an instance that has not answered
that round puts the offer off until it has (a consistent cut as in Chandy and Lamport, 1985, without markers
on every link: only who sends something needs to tell).
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.step import HeldHop

CutKey = tuple[int, int, int, int]
"""(epoch, step, attempt, round)."""


@dataclass(slots=True)
class ConsistentSnapshot:
    """The newest round that this instance has answered, and what it told then."""

    key: CutKey = (0, 0, 0, 0)
    told: tuple[HeldHop, ...] | None = None

    def round(self, epoch: int, step: int, attempt: int) -> int:
        """The round that was answered in this step and attempt; 0 before the first."""
        return self.key[3] if self.key[:3] == (epoch, step, attempt) else 0

    def reach(self, key: CutKey) -> None:
        """A newcomer, who has nothing to tell, stands behind the rounds before it joined."""
        if key > self.key:
            self.key, self.told = key, None

    def tell(self, key: CutKey, held: tuple[HeldHop, ...]) -> tuple[HeldHop, ...]:
        """The answer to this round. A repeated question gets the answer that was given first."""
        if key == self.key and self.told is not None:
            return self.told
        if key >= self.key:
            self.key, self.told = key, held
        return held
