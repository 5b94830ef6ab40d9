"""A bandit that may try things only as far as it can afford to have been wrong (pure).

Arm 0 is the safe one. Each other arm is tried while what all trials have cost beyond the safe arm, plus
what the next might cost, stays below `margin` of what was spent in all: conservative bandits, Wu et al.
(2016), arXiv:1602.04282, with contexts as in Kazerouni et al. (2017), arXiv:1611.06426. Among the arms that
it can afford it takes the one whose cost may be least (lower confidence bound; Auer, 2002). Memory fades,
so that it follows a change; one instance holds one context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FADES = 0.97
"""Weight of an observation after each later one of the same arm."""
FEWEST = 3
"""Observations of the safe arm before anything is tried, and of another before it is believed."""
CONFIDENCE = 1.0
"""Standard errors in a confidence bound."""
RISK = 0.1
"""What an arm without observations may cost beyond the safe one, as a part of it."""
AGAIN = 8
"""The safe arm is taken every so many turns, so that it stays known."""


@dataclass(slots=True)
class _Arm:
    weight: float = 0.0
    total: float = 0.0
    square: float = 0.0
    seen: int = 0

    def add(self, cost: float) -> None:
        self.weight = FADES * self.weight + 1
        self.total = FADES * self.total + cost
        self.square = FADES * self.square + cost * cost
        self.seen += 1

    @property
    def mean(self) -> float:
        return self.total / self.weight

    @property
    def error(self) -> float:
        """Standard error of the mean; at least a fiftieth of it while there are few."""
        spread = math.sqrt(max(0.0, self.square / self.weight - self.mean**2))
        return max(spread, 0.02 * self.mean / self.seen) / math.sqrt(self.weight)


@dataclass(slots=True)
class ConservativeBandit:
    """`choose` an arm, then tell what it `cost`; costs are positive, e.g. seconds of a step."""

    arms: int
    margin: float = 0.01
    spent: float = 0.0
    """All costs so far, as the safe arm's would have been."""
    excess: float = 0.0
    """What trials have cost beyond the safe arm, gains counted."""
    _turn: int = 0
    _known: list[_Arm] = field(init=False)

    def __post_init__(self) -> None:
        self._known = [_Arm() for _ in range(self.arms)]

    def choose(self) -> int:
        """The arm of the next turn."""
        safe = self._known[0]
        if safe.seen < FEWEST or self._turn % AGAIN == 0:
            return 0
        best, least = 0, safe.mean - CONFIDENCE * safe.error
        for number, arm in enumerate(self._known[1:], 1):
            if self.excess + self._risk(arm) > self.margin * (self.spent + safe.mean):
                continue
            bound = arm.mean - CONFIDENCE * arm.error if arm.seen >= FEWEST else 0.0
            if bound < least:
                best, least = number, bound
        return best

    def cost(self, arm: int, cost: float) -> None:
        """What a turn with this arm cost."""
        self._turn += 1
        self._known[arm].add(cost)
        usual = self._known[0].mean if self._known[0].seen else cost
        self.spent += usual
        if arm:
            # Gains pay for trials, but only for so many: what was saved long ago is no licence to waste.
            self.excess = max(self.excess + cost - usual, -self.margin * self.spent)

    def _risk(self, arm: _Arm) -> float:
        """What one more turn with it may cost beyond the safe one."""
        usual = self._known[0].mean
        if arm.seen < FEWEST:
            return max(RISK * usual, arm.mean - usual if arm.seen else 0.0)
        return max(0.0, arm.mean + CONFIDENCE * arm.error - usual)
