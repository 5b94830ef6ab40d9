"""Wait or replace: how long to wait for a silent instance before it is given up (pure; numpy).

Waiting costs its time; replacing costs `price_s` and ends the wait: this is ski rental. A wait of `price_s`
costs at most twice the optimum in hindsight (Karlin et al., 1990, doi:10.1007/BF01759073). If the
distribution of past outages is known, a shorter wait of least expected cost pays (Khanafer et al., 2013,
doi:10.1109/INFCOM.2013.6566943). It is computed by kind of outage and never exceeds `price_s`, so that the
worst-case bound stays. An outage's length is known once it has ended or lasted `price_s`: replaced instances
are still watched, so that a wait that was too short shows.

The distribution has two parts: a share of outages lasts, the rest end by themselves after a log-normal time.
A few dozen outages determine both parts; a tail without a form would need many more.

`Flapping` is the hysteresis for repeated outages: a fading penalty per outage; the instance is avoided above
one limit and trusted again only below a lower one (RFC 2439, Villamizar et al., 1998).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from policies.numerics.features import Floats

REMEMBERED = 200
"""Most outages remembered of each kind; older ones no longer apply."""
FADES = 0.98
"""Factor on the weight of an outage at each later one of its kind."""
USUAL_SPREAD, SPREAD_WEIGHT = 0.8, 3.0
"""Prior standard deviation of the logarithm, and the number of outages as which it counts."""
FIRST_PART = 1 / 20
"""Prior length of an outage that ends by itself, as a share of the price."""
SHORTEST = 1e-3
"""Seconds as which a shorter outage counts."""
WAITS = np.append(0.0, np.geomspace(1 / 300, 1.0, 48))
"""Waits to choose from, as shares of the price."""


class Expectation(NamedTuple):
    """The distribution of outages.

    `lasting`: the share that lasts; `log_mean`, `log_spread`: mean and deviation of the logarithm of seconds
    of the rest.
    """

    lasting: float
    log_mean: float
    log_spread: float

    def ended_by(self, seconds: Floats) -> Floats:
        """Of the outages that end by themselves, the share that has ended after `seconds`."""
        return _normal((np.log(np.maximum(seconds, SHORTEST)) - self.log_mean) / self.log_spread)


@dataclass(slots=True)
class OutageHistory:
    """Past outages by kind. `price_s`: the cost of a replacement, in seconds of waiting."""

    price_s: float
    _seconds: dict[str, deque[float]] = field(default_factory=dict)

    def ended(self, kind: str, seconds: float) -> None:
        """Records an outage that ended after `seconds`, or has lasted `price_s` or longer."""
        history = self._seconds.setdefault(kind, deque(maxlen=REMEMBERED))
        history.append(min(max(seconds, SHORTEST), self.price_s))

    def as_data(self) -> dict[str, list[float]]:
        """Seconds of the remembered outages by kind, as plain data."""
        return {kind: list(seconds) for kind, seconds in self._seconds.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Goes on from what `as_data` returned. Raises `ValueError` for an outage that can't have been."""
        if any(not SHORTEST <= one <= self.price_s for seconds in state.values() for one in seconds):
            raise ValueError(f"an outage is not within {SHORTEST:g}…{self.price_s:g} s")
        self._seconds = {kind: deque(seconds, maxlen=REMEMBERED) for kind, seconds in state.items()}

    def patience_s(self, kind: str) -> float:
        """Seconds to wait before replacing; 0: replace at once."""
        expected, waits = self.expectation(kind), WAITS * self.price_s
        mean_s = math.exp(expected.log_mean + expected.log_spread**2 / 2)
        ended = expected.ended_by(waits)
        # An outage that ends meanwhile costs its length: the partial mean of a log-normal.
        of_ended = mean_s * expected.ended_by(waits * math.exp(-(expected.log_spread**2)))
        cost = expected.lasting * (waits + self.price_s) + (1 - expected.lasting) * (
            of_ended + (1 - ended) * (waits + self.price_s)
        )
        return float(waits[int(np.argmin(cost))])

    def lasting(self, kind: str, elapsed_s: float) -> float:
        """The probability that an outage which has lasted `elapsed_s` will last `price_s`."""
        expected = self.expectation(kind)
        ended = float(expected.ended_by(np.array([elapsed_s]))[0])
        return expected.lasting / (expected.lasting + (1 - expected.lasting) * (1 - ended) + 1e-12)

    def expectation(self, kind: str) -> Expectation:
        """The distribution for this kind; all kinds together count as one more outage of it."""
        everything = np.array([seconds for history in self._seconds.values() for seconds in history])
        all_last = everything >= self.price_s
        part = (all_last.sum() + 0.5) / (len(everything) + 1)
        logs = np.log(everything[~all_last])
        usual = float(logs.mean()) if logs.size else math.log(FIRST_PART * self.price_s)
        own = np.array(self._seconds.get(kind, ()))
        weight = FADES ** np.arange(len(own))[::-1]
        last = own >= self.price_s
        weights, logs = weight[~last], np.log(own[~last])
        mean = (weights @ logs + usual) / (weights.sum() + 1)
        squares = weights @ (logs - mean) ** 2 + SPREAD_WEIGHT * USUAL_SPREAD**2
        lasting = (weight[last].sum() + part) / (weight.sum() + 1)
        spread = math.sqrt(squares / (weights.sum() + SPREAD_WEIGHT))
        return Expectation(float(lasting), float(mean), spread)


def _normal(values: Floats) -> Floats:
    """The distribution function of the normal distribution."""
    return np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in values.tolist()])


@dataclass(slots=True)
class Flapping:
    """A penalty that grows by 1 with each outage and fades by half in `half_life_s`."""

    half_life_s: float = 120.0
    high: float = 3.0
    low: float = 1.0
    _penalty: float = 0.0
    _at: float = 0.0
    _shunned: bool = False

    def as_data(self) -> tuple[float, float, bool]:
        """Penalty, when it was so high, and whether it is avoided."""
        return self._penalty, self._at, self._shunned

    def restore(self, penalty: float, at: float, shunned: bool) -> None:
        """Goes on from what `as_data` returned."""
        self._penalty, self._at, self._shunned = penalty, at, shunned

    def fell(self, at: float) -> None:
        """Adds one more outage."""
        self._penalty = self.penalty(at) + 1.0
        self._at = max(at, self._at)
        self._shunned = self._shunned or self._penalty >= self.high

    def penalty(self, now: float) -> float:
        return float(self._penalty * 0.5 ** (max(0.0, now - self._at) / self.half_life_s))

    def shunned(self, now: float) -> bool:
        """Whether the penalty has been above the upper limit and not yet below the lower one."""
        return self._shunned and self.penalty(now) >= self.low

    def back_s(self, now: float) -> float:
        """Seconds until it is trusted again, if no outage comes meanwhile; 0: it is trusted."""
        if not self.shunned(now):
            return 0.0
        return float(self.half_life_s * np.log2(self.penalty(now) / self.low))

    def trusted(self, now: float) -> None:
        """Updates the state at `now`: once it is trusted again, only the upper limit applies."""
        if self._shunned and self.penalty(now) < self.low:
            self._shunned = False
