"""The consistent snapshot behind a path repair: an instance's answer to a fence round (DESIGN §5 rule 1).

Instances answer a fence at different moments, and living instances go on exchanging microbatches meanwhile.
The orchestrator's snapshot is consistent only if no answer shows the effect of an event that another answer
does not show yet. So an offer carries the round of its sender's last answer, and an instance that has not
answered that round postpones the offer until it has. This is a consistent cut as in Chandy and Lamport
(1985), without markers on every link: only senders mark their messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.step import HeldHop

SnapshotKey = tuple[int, int, int, int]
"""(epoch, step, attempt, round)."""


@dataclass(slots=True)
class ConsistentSnapshot:
    """The newest round that this instance has answered, and its answer."""

    key: SnapshotKey = (0, 0, 0, 0)
    answer: tuple[HeldHop, ...] | None = None

    def round(self, epoch: int, step: int, attempt: int) -> int:
        """The newest round answered in this step and attempt; 0 before the first."""
        return self.key[3] if self.key[:3] == (epoch, step, attempt) else 0

    def reach(self, key: SnapshotKey) -> None:
        """Counts a round as answered: a newcomer holds nothing of the rounds before it joined."""
        if key > self.key:
            self.key, self.answer = key, None

    def record(self, key: SnapshotKey, hops: tuple[HeldHop, ...]) -> tuple[HeldHop, ...]:
        """Records `hops` as the answer to this round; a repeated request gets the first answer."""
        if key == self.key and self.answer is not None:
            return self.answer
        if key >= self.key:
            self.key, self.answer = key, hops
        return hops
