"""Wait or replace: how long to wait for what fell silent before it is given up (pure; numpy).

Waiting costs its time, replacing costs `price_s` and ends it: ski rental. Whoever waits `price_s` pays at
most twice what hindsight would have (Karlin et al., 1990, doi:10.1007/BF01759073). With the distribution of
past outages a shorter wait pays: the one of least expected cost (Khanafer et al., 2013,
doi:10.1109/INFCOM.2013.6566943), by kind of outage, and never longer than `price_s`, so that the bound of
the worst case stays. An outage counts as known once it has ended or lasted `price_s`: what was replaced
goes on being watched, so that a wait that was too short is found out.

The distribution is two-fold: a part lasts, the rest ends by itself after a log-normal time. A few dozen
outages tell both, which they would not of a tail without a form.

`Flapping` is the hysteresis for what comes back again and again: a penalty per outage that fades, given up
above one limit and trusted again only below a lower one (RFC 2439, Villamizar et al., 1998).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from policies.numerics.features import Floats

REMEMBERED = 200
"""Outages of each kind; older ones are of another time."""
FADES = 0.98
"""What the weight of an outage is multiplied with at each later one of its kind."""
USUAL_SPREAD, SPREAD_WEIGHT = 0.8, 3.0
"""Standard deviation of the logarithm before any outage has ended, and how many it weighs as."""
FIRST_PART = 1 / 20
"""Of the price: how long an outage takes that ends by itself, before any has."""
SHORTEST_S = 1e-3
WAITS = np.append(0.0, np.geomspace(1 / 300, 1.0, 48))
"""Parts of the price that are tried."""


class Expectation(NamedTuple):
    """`lasting`: the part that lasts; of the rest the mean and deviation of the logarithm of seconds."""

    lasting: float
    log_mean: float
    log_spread: float

    def ended_by(self, seconds: Floats) -> Floats:
        """The part of those that end by themselves which have ended after so many seconds."""
        return _normal((np.log(np.maximum(seconds, SHORTEST_S)) - self.log_mean) / self.log_spread)


@dataclass(slots=True)
class OutageHistory:
    """Past outages by kind. `price_s`: what a replacement costs, in seconds of waiting."""

    price_s: float
    _seconds: dict[str, deque[float]] = field(default_factory=dict)

    def ended(self, kind: str, seconds: float) -> None:
        """An outage ended after `seconds`, or has lasted `price_s` and longer."""
        held = self._seconds.setdefault(kind, deque(maxlen=REMEMBERED))
        held.append(min(max(seconds, SHORTEST_S), self.price_s))

    def patience_s(self, kind: str) -> float:
        """Seconds to wait before replacing; 0: replace at once."""
        expected, waits = self.expectation(kind), WAITS * self.price_s
        mean_s = math.exp(expected.log_mean + expected.log_spread**2 / 2)
        ended = expected.ended_by(waits)
        # What ends meanwhile costs its length: the partial mean of a log-normal.
        of_ended = mean_s * expected.ended_by(waits * math.exp(-(expected.log_spread**2)))
        cost = expected.lasting * (waits + self.price_s) + (1 - expected.lasting) * (
            of_ended + (1 - ended) * (waits + self.price_s)
        )
        return float(waits[int(np.argmin(cost))])

    def lasting(self, kind: str, elapsed_s: float) -> float:
        """How likely it is that an outage lasts `price_s` that has lasted `elapsed_s`."""
        expected = self.expectation(kind)
        ended = float(expected.ended_by(np.array([elapsed_s]))[0])
        return expected.lasting / (expected.lasting + (1 - expected.lasting) * (1 - ended) + 1e-12)

    def expectation(self, kind: str) -> Expectation:
        """What is known of this kind; all kinds together count as one more outage of it."""
        everything = np.array([one for held in self._seconds.values() for one in held])
        all_last = everything >= self.price_s
        part = (all_last.sum() + 0.5) / (len(everything) + 1)
        logs = np.log(everything[~all_last])
        usual = float(logs.mean()) if logs.size else math.log(FIRST_PART * self.price_s)
        own = np.array(self._seconds.get(kind, ()))
        weight = FADES ** np.arange(len(own))[::-1]
        last = own >= self.price_s
        told, logs = weight[~last], np.log(own[~last])
        mean = (told @ logs + usual) / (told.sum() + 1)
        squares = told @ (logs - mean) ** 2 + SPREAD_WEIGHT * USUAL_SPREAD**2
        lasting = (weight[last].sum() + part) / (weight.sum() + 1)
        return Expectation(float(lasting), float(mean), math.sqrt(squares / (told.sum() + SPREAD_WEIGHT)))


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

    def fell(self, at: float) -> None:
        """One more outage."""
        self._penalty = self.penalty(at) + 1.0
        self._at = max(at, self._at)
        self._shunned = self._shunned or self._penalty >= self.high

    def penalty(self, now: float) -> float:
        return float(self._penalty * 0.5 ** (max(0.0, now - self._at) / self.half_life_s))

    def shunned(self, now: float) -> bool:
        """Whether it has flapped above the upper limit and not yet faded below the lower one."""
        return self._shunned and self.penalty(now) >= self.low

    def back_s(self, now: float) -> float:
        """Seconds until it is trusted again, if it does not fall meanwhile; 0: it is."""
        if not self.shunned(now):
            return 0.0
        return float(self.half_life_s * np.log2(self.penalty(now) / self.low))

    def trusted(self, now: float) -> None:
        """Takes notice of the time: once trusted again, only the upper limit counts."""
        if self._shunned and self.penalty(now) < self.low:
            self._shunned = False
