"""A conservative bandit: it tries arms only while it can afford the cost of being wrong (pure).

Arm 0 is the safe one. Another arm is tried while the cost of all trials beyond the safe arm, plus the
possible cost of the next, stays below `margin` of all costs: conservative bandits, Wu et al. (2016),
arXiv:1602.04282, with contexts as in Kazerouni et al. (2017), arXiv:1611.06426. Among the affordable arms it
takes the one whose cost may be least (lower confidence bound; Auer, 2002). Memory fades, so that it follows a
change; one object holds one context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FADES = 0.97
"""Weight of an observation after each later one of the same arm."""
FEWEST = 3
"""Observations of the safe arm before a trial, and of another arm before its mean is used."""
CONFIDENCE = 1.0
"""Standard errors in a confidence bound."""
RISK = 0.1
"""Assumed extra cost of an arm without observations, as a share of the safe arm's cost."""
AGAIN = 8
"""The safe arm is taken in every turn of this number, so that its cost stays known."""


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
        """Standard error of the mean; at least a fiftieth of it while there are few observations."""
        spread = math.sqrt(max(0.0, self.square / self.weight - self.mean**2))
        return max(spread, 0.02 * self.mean / self.seen) / math.sqrt(self.weight)


@dataclass(slots=True)
class ConservativeBandit:
    """Call `choose` for an arm, then report its `cost`; costs are positive, e.g. seconds of a step."""

    arms: int
    margin: float = 0.01
    spent: float = 0.0
    """All costs so far, at the safe arm's mean."""
    excess: float = 0.0
    """Cost of trials beyond the safe arm, less their gains."""
    _turn: int = 0
    _arms: list[_Arm] = field(init=False)

    def __post_init__(self) -> None:
        self._arms = [_Arm() for _ in range(self.arms)]

    def choose(self) -> int:
        """The arm of the next turn."""
        safe = self._arms[0]
        if safe.seen < FEWEST or self._turn % AGAIN == 0:
            return 0
        best, least = 0, safe.mean - CONFIDENCE * safe.error
        for number, arm in enumerate(self._arms[1:], 1):
            if self.excess + self._risk(arm) > self.margin * (self.spent + safe.mean):
                continue
            bound = arm.mean - CONFIDENCE * arm.error if arm.seen >= FEWEST else 0.0
            if bound < least:
                best, least = number, bound
        return best

    def cost(self, arm: int, cost: float) -> None:
        """Records the cost of a turn with this arm."""
        self._turn += 1
        self._arms[arm].add(cost)
        usual = self._arms[0].mean if self._arms[0].seen else cost
        self.spent += usual
        if arm:
            # Gains pay for trials, but only up to a limit, so that old gains do not pay for much waste.
            self.excess = max(self.excess + cost - usual, -self.margin * self.spent)

    def _risk(self, arm: _Arm) -> float:
        """The possible cost of one more turn with this arm beyond the safe one."""
        usual = self._arms[0].mean
        if arm.seen < FEWEST:
            return max(RISK * usual, arm.mean - usual if arm.seen else 0.0)
        return max(0.0, arm.mean + CONFIDENCE * arm.error - usual)
