"""A conservative bandit: it tries arms only while it can afford the cost of being wrong (pure).

Arm 0 is the safe one. Another arm is tried while the cost of all trials beyond the safe arm, plus the
possible cost of the next, stays below `margin` of all costs: conservative bandits, Wu et al. (2016),
arXiv:1602.04282, with contexts as in Kazerouni et al. (2017), arXiv:1611.06426. Among the affordable arms it
takes the one whose cost may be least (lower confidence bound; Auer, 2002). Memory fades, so that it follows a
change; one object holds one context. What was learnt elsewhere comes in as a prior: cost of each arm relative
to the safe one, with a weight in observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import TypedDict

FADES = 0.97
"""Weight of an observation after each later one of the same arm."""
FEWEST = 3
"""Observations of the safe arm before a trial, and of another arm before its mean is used."""
CONFIDENCE = 1.0
"""Standard errors in a confidence bound."""
RISK = 0.1
"""Assumed extra cost of an arm without observations, as a share of the safe arm's cost."""
PRIOR_ERROR = 0.05
"""Standard error of a prior of weight 1, as a share of the safe arm's cost."""
AGAIN = 8
"""The safe arm is taken in every turn of this number, so that its cost stays known."""


class ArmPrior(NamedTuple):
    """What is known of an arm from elsewhere: its cost ÷ the safe arm's, as `weight` observations."""

    ratio: float
    weight: float


class BanditState(TypedDict):
    """A bandit as plain data; of each arm the fading weight, sum, sum of squares and number of its costs."""

    spent: float
    excess: float
    turn: int
    arms: list[tuple[float, float, float, int]]


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
    prior: Sequence[ArmPrior] = ()
    """By arm; empty: nothing is known from elsewhere."""
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
            if self.excess + self._risk(number, arm) > self.margin * (self.spent + safe.mean):
                continue
            bound = self._least(number, arm)
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

    def ratios(self) -> list[ArmPrior]:
        """What it knows of each arm, for another bandit's prior; weight 0: nothing."""
        safe = self._arms[0]
        if safe.seen < FEWEST:
            return [ArmPrior(1.0, 0.0)] * self.arms
        return [
            ArmPrior(arm.mean / safe.mean, min(arm.weight, safe.weight)) if arm.seen else ArmPrior(1.0, 0.0)
            for arm in self._arms
        ]

    def as_data(self) -> BanditState:
        arms = [(arm.weight, arm.total, arm.square, arm.seen) for arm in self._arms]
        return BanditState(spent=self.spent, excess=self.excess, turn=self._turn, arms=arms)

    def restore(self, state: BanditState) -> None:
        """Goes on from what `as_data` returned. Raises `ValueError` if it is of another number of arms."""
        if len(state["arms"]) != self.arms:
            raise ValueError(f"{len(state['arms'])} arms, this bandit has {self.arms}")
        self.spent, self.excess, self._turn = state["spent"], state["excess"], state["turn"]
        self._arms = [_Arm(*arm) for arm in state["arms"]]

    def _prior(self, number: int) -> ArmPrior | None:
        """The prior of an arm, if it has one that counts."""
        known = number < len(self.prior) and self.prior[number].weight > 0
        return self.prior[number] if known else None

    def _least(self, number: int, arm: _Arm) -> float:
        """The lower confidence bound of an arm's cost: 0 while nothing is known of it."""
        if arm.seen >= FEWEST:
            return arm.mean - CONFIDENCE * arm.error
        if (prior := self._prior(number)) is None:
            return 0.0
        usual = self._arms[0].mean
        return usual * (prior.ratio - CONFIDENCE * PRIOR_ERROR / math.sqrt(prior.weight))

    def _risk(self, number: int, arm: _Arm) -> float:
        """The possible cost of one more turn with this arm beyond the safe one."""
        usual = self._arms[0].mean
        if arm.seen < FEWEST and (prior := self._prior(number)) is not None:
            foreseen = prior.ratio - 1 + CONFIDENCE * PRIOR_ERROR / math.sqrt(prior.weight)
            return max(0.0, usual * foreseen, arm.mean - usual if arm.seen else 0.0)
        if arm.seen < FEWEST:
            return max(RISK * usual, arm.mean - usual if arm.seen else 0.0)
        return max(0.0, arm.mean + CONFIDENCE * arm.error - usual)
