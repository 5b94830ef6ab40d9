"""Will a repair take longer than a limit? Online logistic regression on what its beginning tells (pure).

Three figures, chosen on the first half of the log of InfiniteHBD (docs): how long repairs of this kind took
(the median of the logarithm), how long ago anything was last repaired, and how many faults are open that
began within the limit. A fault's answer is known once it is repaired or the limit is over; the model is
fitted anew from all known ones, with a ridge (Hoerl & Kennard, 1970), so that a dozen faults don't make it
sure of anything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from policies.numerics.logistic import fit_logistic

RIDGE = 5.0
LEAST = 20
"""Known repairs before anything is said but 0.5."""
SHORTEST = 1e-3
"""Of the limit: shorter repairs count as this."""


@dataclass(slots=True)
class _Fault:
    at: float
    kind: str
    features: tuple[float, float, float]
    ended: float = math.inf


@dataclass(slots=True)
class RepairOutlook:
    """Times in any unit; `limit` in the same."""

    limit: float
    _faults: list[_Fault] = field(default_factory=list)
    _repairs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _repaired_at: float = -math.inf

    def began(self, kind: str, at: float) -> int:
        """A fault began, not earlier than any before it; returns its number."""
        young = sum(fault.at < at < fault.ended and at - fault.at <= self.limit for fault in self._faults)
        past = self._repairs.get(kind)
        since = (at - self._repaired_at) / self.limit
        features = (
            median(past) if past else 0.0,
            math.log(since + SHORTEST) if math.isfinite(since) else 0.0,
            math.log1p(young),
        )
        self._faults.append(_Fault(at, kind, features))
        return len(self._faults) - 1

    def repaired(self, number: int, at: float) -> None:
        """The fault of that number is over."""
        fault = self._faults[number]
        fault.ended = at
        self._repairs[fault.kind].append(math.log(max((at - fault.at) / self.limit, SHORTEST)))
        self._repaired_at = max(self._repaired_at, at)

    def longer(self, number: int) -> float:
        """How likely the fault of that number lasts longer than the limit, as seen when it began."""
        now = self._faults[number].at
        known = [
            fault for fault in self._faults[:number] if fault.ended <= now or now - fault.at > self.limit
        ]
        if len(known) < LEAST:
            return 0.5
        longer = np.array([fault.ended - fault.at > self.limit for fault in known])
        model = fit_logistic(np.array([fault.features for fault in known]), longer, ridge=RIDGE)
        return float(model.probability(np.array([self._faults[number].features]))[0])
