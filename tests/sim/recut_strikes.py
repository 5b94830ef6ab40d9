"""What befalls a schedule of re-cuts: who dies, or which messages are lost, in which phase."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

ORDERS = ("prepare", "send", "fill", "switch")
PHASES = (*ORDERS, "commit", "checkpoint", "restore", "step")
"""The orders of a re-cut, the write of the job's record, a checkpoint, a return to one, and a step."""

WHERE = {
    "member": (*ORDERS, "checkpoint", "restore", "step"),
    "leader": PHASES,
    "data": ("switch", "step"),
    "restart": (*ORDERS, "commit", "checkpoint"),
    "silence": ORDERS,
}
"""What may be struck in which phases.

`restart`: the server restarts, so that an order, or its answer, is lost and given again. `silence`: no answer
comes within the deadline, although the member lives.
"""


@dataclass(frozen=True)
class Strike:
    """One fault. `after`: once the order is obeyed, or the write is made."""

    what: str
    phase: str
    after: bool


class Strikes:
    """The faults of one schedule, drawn in advance, so that each phase has its share.

    Args:
        chance: of the schedule.
        counts: How many faults of which kind, by `WHERE`.
    """

    def __init__(self, chance: random.Random, counts: dict[str, int]) -> None:
        self._chance = chance
        self._due = [
            Strike(what, chance.choice(WHERE[what]), chance.random() < 0.5)
            for what, count in counts.items()
            for _ in range(count)
        ]
        self.fired: Counter[str] = Counter()
        """How often what was struck where: 'giver: prepare, after'."""

    def due(self, what: str, phase: str, *, after: bool, who: str = "") -> bool:
        """Whether this happens here and now, perhaps; it is then counted, under `who` it happens to."""
        strike = Strike(what, phase, after)
        if strike not in self._due or self._chance.random() < 0.6:
            return False
        self._due.remove(strike)
        self.fired[f"{who or what}: {phase}, {'after' if after else 'before'}"] += 1
        return True
