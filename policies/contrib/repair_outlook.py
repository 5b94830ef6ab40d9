"""Will a repair take longer than a limit? Online logistic regression on figures at its beginning (pure).

Three figures, chosen on the first half of the log of InfiniteHBD (docs), are used: how long repairs of this
kind took (the median of the logarithm), how long ago the last repair was, and how many open faults began
within the limit. A fault's outcome is known once it is repaired or the limit is over. The model is fitted
again from all known outcomes, with a ridge (Hoerl & Kennard, 1970), so that a dozen faults do not make it
overconfident.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from policies.contrib.logistic import fit_logistic

RIDGE = 5.0
LEAST = 20
"""Known outcomes before a prediction other than 0.5."""
SHORTEST = 1e-3
"""Share of the limit: shorter repairs count as this long."""


@dataclass(slots=True)
class _Fault:
    at: float
    kind: str
    features: tuple[float, float, float]
    ended: float = math.inf


@dataclass(slots=True)
class RepairOutlook:
    """The outlook of repairs. Times are in any unit; `limit` is in the same."""

    limit: float
    _faults: list[_Fault] = field(default_factory=list)
    _repairs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _repaired_at: float = -math.inf

    def began(self, kind: str, at: float) -> int:
        """Adds a fault that began at `at`, not earlier than those before; returns its number."""
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
        """Ends the fault of that number."""
        fault = self._faults[number]
        fault.ended = at
        self._repairs[fault.kind].append(math.log(max((at - fault.at) / self.limit, SHORTEST)))
        self._repaired_at = max(self._repaired_at, at)

    def longer(self, number: int) -> float:
        """The probability that the fault of that number lasts longer than the limit, as of its beginning."""
        now = self._faults[number].at
        outcomes = [
            fault for fault in self._faults[:number] if fault.ended <= now or now - fault.at > self.limit
        ]
        if len(outcomes) < LEAST:
            return 0.5
        longer = np.array([fault.ended - fault.at > self.limit for fault in outcomes])
        model = fit_logistic(np.array([fault.features for fault in outcomes]), longer, ridge=RIDGE)
        return float(model.probability(np.array([self._faults[number].features]))[0])
