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

RoundKey = tuple[int, int, int]
"""(epoch, attempt, round) of a path repair: a later one replaces earlier ones."""
SnapshotKey = tuple[int, int, int, int]
"""(epoch, attempt, step, round). A roll-back begins an attempt at a smaller step; else steps only grow."""


@dataclass(slots=True)
class ConsistentSnapshot:
    """The newest round that this instance has answered, and its answer."""

    key: SnapshotKey = (0, 0, 0, 0)
    answer: tuple[HeldHop, ...] | None = None
    newest: RoundKey = (0, 0, 0)
    """The newest round that was answered or whose repairs were taken."""

    def round(self, epoch: int, step: int, attempt: int) -> int:
        """The newest round answered in this step and attempt; 0 before the first."""
        return self.key[3] if self.key[:3] == (epoch, attempt, step) else 0

    def reach(self, order: RoundKey, step: int) -> None:
        """Counts a round as answered: a newcomer holds nothing of the rounds before it joined."""
        key = _key(order, step)
        if key > self.key:
            self.key, self.answer = key, None

    def record(self, order: RoundKey, step: int, hops: tuple[HeldHop, ...]) -> tuple[HeldHop, ...]:
        """Records `hops` as the answer to this round; a repeated request gets the first answer.

        Repairs of earlier rounds are refused from now on, so that they cannot contradict the answer.
        """
        self.newest = max(self.newest, order)
        key = _key(order, step)
        if key == self.key and self.answer is not None:
            return self.answer
        if key >= self.key:
            self.key, self.answer = key, hops
        return hops

    def takes(self, order: RoundKey) -> bool:
        """Whether the repairs of this round may be carried out; then those of earlier rounds may not."""
        if order < self.newest:
            return False
        self.newest = order
        return True


def _key(order: RoundKey, step: int) -> SnapshotKey:
    epoch, attempt, number = order
    return (epoch, attempt, step, number)
