"""Whether errors still come from where they came from: sequential tests with a stated rate (pure).

Both multiply bets against "nothing has changed" into a wealth, which begins anew whenever it falls below 1,
and raise the alarm at `1 / rate`. A bet of mean at most 1 makes that an e-detector (J. Shin, A. Ramdas,
A. Rinaldo: E-detectors: a nonparametric framework for online changepoint detection, 2022, arXiv:2203.03532):
within n observations without a change, the chance of a false alarm is at most `n · rate`.

`ErrorDrift` bets on ranks: where errors are exchangeable, the rank of the last one among all is uniform,
whatever their distribution (V. Vovk, A. Gammerman, G. Shafer: Algorithmic Learning in a Random World, 2005).
It bets that errors become larger. `MissDrift` bets on misses: that more than half of the forecasts miss.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import TypedDict

RATE = 1e-5
"""False alarms per observation without a change: at most 1 % in 1,000."""
MISS_RATE = 1e-3
"""The same for forecasts of changes, of which there are few: at most 1 % in ten."""
REMEMBERED = 512
"""Most errors that the ranks are among: the first ones."""
LEAST = 40
"""Errors before the first bet."""
STAKES = (0.3, 0.5, 0.8)
"""Exponents ε of the bets ε · p^(ε − 1), which are taken together: small ones win by rare, very large errors,
great ones by many that are somewhat larger."""
SETTLED = 200
"""Errors in a row that look as before after which an alarm ends."""


class ErrorDriftState(TypedDict):
    """A detector as plain data."""

    errors: list[float]
    wealth: list[float]
    drifted: bool
    calm: int


@dataclass(slots=True)
class ErrorDrift:
    """Notices that non-negative errors have become larger than the first ones were."""

    rate: float = RATE
    drifted: bool = False
    """Whether they have, and have not been as before for `SETTLED` errors since."""
    _errors: list[float] = field(default_factory=list)
    _wealth: list[float] = field(default_factory=lambda: [1.0] * len(STAKES))
    _calm: int = 0

    @classmethod
    def of(cls, errors: Sequence[float], rate: float = RATE) -> ErrorDrift:
        """A detector that knows errors of a training already: `REMEMBERED` of them, evenly by rank."""
        finite = sorted(error for error in errors if math.isfinite(error))
        if len(finite) > REMEMBERED:
            step = (len(finite) - 1) / (REMEMBERED - 1)
            finite = [finite[round(at * step)] for at in range(REMEMBERED)]
        return cls(rate=rate, _errors=finite)

    def add(self, error: float) -> None:
        """Adds an error; one that is not finite counts as larger than all."""
        error = math.inf if not math.isfinite(error) else error
        if len(self._errors) >= LEAST:
            larger = len(self._errors) - bisect_left(self._errors, error)
            self._bet((1 + larger) / (1 + len(self._errors)))
        if len(self._errors) < REMEMBERED and math.isfinite(error) and not self.drifted:
            insort(self._errors, error)

    def _bet(self, p: float) -> None:
        """Takes one rank, as a share: 1 for the smallest error; ties count for nothing having changed."""
        bets = (stake * p ** (stake - 1) for stake in STAKES)
        self._wealth = [max(1.0, wealth) * bet for wealth, bet in zip(self._wealth, bets, strict=True)]
        together = sum(self._wealth) / len(self._wealth)
        if together >= 1 / self.rate:
            self.drifted, self._calm = True, 0
            self._wealth = [1.0] * len(STAKES)
        elif self.drifted:
            self._calm = self._calm + 1 if together < CALM else 0
            self.drifted = self._calm < SETTLED

    @property
    def usual(self) -> float:
        """The median of the first errors; NaN if there are none."""
        return self._errors[len(self._errors) // 2] if self._errors else math.nan

    def as_data(self) -> ErrorDriftState:
        return ErrorDriftState(
            errors=list(self._errors), wealth=list(self._wealth), drifted=self.drifted, calm=self._calm
        )

    def restore(self, state: ErrorDriftState) -> None:
        """Goes on from what `as_data` returned. Raises `ValueError` if it is none."""
        errors, wealth = state["errors"], state["wealth"]
        if len(errors) > REMEMBERED or errors != sorted(errors) or len(wealth) != len(STAKES):
            raise ValueError("a drift detector whose errors are out of order")
        self._errors, self._wealth = list(errors), list(wealth)
        self.drifted, self._calm = state["drifted"], state["calm"]


CALM = 20.0
"""Wealth below which errors look as before, once an alarm was raised."""


@dataclass(slots=True)
class MissDrift:
    """Notices that more than half of the forecasts miss."""

    rate: float = MISS_RATE
    stake: float = 0.8
    """Share of the wealth that is bet on a miss: a miss multiplies it by 1 + stake, a hit by 1 − stake."""
    seen: int = 0
    missed: int = 0
    drifted: bool = False
    _wealth: float = 1.0

    def add(self, *, miss: bool) -> None:
        """Adds one forecast beside its outcome. An alarm ends with three hits in a row."""
        self.seen, self.missed = self.seen + 1, self.missed + miss
        self._wealth = max(1.0, self._wealth) * (1 + self.stake if miss else 1 - self.stake)
        if self._wealth >= 1 / self.rate:
            self.drifted = True
        elif self._wealth < 1:
            self.drifted = False
