"""The changing failure rate of a job (pure): Bayesian change-point detection over the gaps.

Between changes failures are a Poisson process of unknown rate; at any failure the rate may change. For each
possible time of the last change, the model has its probability and the Gamma posterior of the rate since then
(conjugate: failures and time simply add up). The gap that is still open counts as survival: it makes a high
rate, and any history that implies one, less likely as time passes.

See Adams & MacKay (2007), arXiv:0710.3742. The interval between checkpoints follows from the rate by Daly's
formula, doi:10.1016/j.future.2004.11.016, which the orchestrator applies (`checkpoint_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

Floats = npt.NDArray[np.float64]

PRIOR_FAILURES = 1.0
"""Number of failures as which the prior expectation counts, at the start and after each change."""
CHANGE = 0.04
"""Probability that a failure begins another regime: one in 25."""
_FASTER = 4.0 ** np.arange(6)
_CHANCE = 8.0 ** -np.arange(6)
CHANCE = _CHANCE / _CHANCE.sum()
FASTER = _FASTER / (CHANCE * _FASTER).sum()
"""A regime may be a thousand times as bad as expected. So the prior is a mixture whose mean is the
expectation: a component near the expectation, and ever less likely ones, each four times as fast. A single
Gamma would keep an expectation of days through a dozen failures within an hour."""
KEPT = 120
"""Most hypotheses (time of the last change, prior); the least likely are dropped."""


class FailureRateState(TypedDict):
    """A failure rate as plain data; of each hypothesis: log weight, prior, failures and seconds since."""

    expected_s: float
    since_s: float
    failures: int
    hypotheses: list[tuple[float, float, float, float]]


@dataclass(slots=True)
class FailureRate:
    """Failures of one job. `expected_s`: prior expectation of the seconds between two."""

    expected_s: float
    since_s: float = 0.0
    """Time of the last failure, or of the beginning of the observation."""
    failures: int = 0
    _log_weight: Floats = field(default_factory=lambda: np.log(CHANCE))
    _faster: Floats = field(default_factory=lambda: FASTER)
    _count: Floats = field(default_factory=lambda: np.zeros(len(FASTER)))
    _observed_s: Floats = field(default_factory=lambda: np.zeros(len(FASTER)))

    def failed(self, at_s: float) -> None:
        """Adds a failure; a time before the last one counts as the time of the last one."""
        gap_s = max(0.0, at_s - self.since_s)
        shape, scale_s = self._posterior()
        # The Lomax density of a gap under a Gamma rate.
        likelihood = np.log(shape) - np.log(scale_s) - (shape + 1) * np.log1p(gap_s / scale_s)
        weight = self._log_weight + likelihood
        weight = weight - np.logaddexp.reduce(weight) + np.log1p(-CHANGE)
        count, observed_s, faster = self._count + 1, self._observed_s + gap_s, self._faster
        if len(count) + len(FASTER) > KEPT:
            likely = np.sort(np.argsort(weight)[len(count) + len(FASTER) - KEPT :])
            weight, count, observed_s, faster = (
                weight[likely],
                count[likely],
                observed_s[likely],
                faster[likely],
            )
        # A change happens at the failure: the gap before it belongs to the former regime.
        zeros = np.zeros(len(FASTER))
        self._log_weight = np.append(weight, np.log(CHANGE) + np.log(CHANCE))
        self._count, self._observed_s = np.append(count, zeros), np.append(observed_s, zeros)
        self._faster = np.append(faster, FASTER)
        self.since_s, self.failures = max(self.since_s, at_s), self.failures + 1

    def as_data(self) -> FailureRateState:
        columns = (self._log_weight, self._faster, self._count, self._observed_s)
        rows = np.stack(columns, axis=1).tolist()
        return FailureRateState(
            expected_s=self.expected_s,
            since_s=self.since_s,
            failures=self.failures,
            hypotheses=[tuple(row) for row in rows],
        )

    @classmethod
    def of_data(cls, state: FailureRateState) -> FailureRate:
        """Goes on from what `as_data` returned. Raises `ValueError` if it holds no hypothesis."""
        if not 0 < len(state["hypotheses"]) <= KEPT or state["expected_s"] <= 0:
            raise ValueError(f"a failure rate with {len(state['hypotheses'])} hypotheses")
        rate = cls(state["expected_s"], state["since_s"], state["failures"])
        columns = np.array(state["hypotheses"], dtype=np.float64).T
        rate._log_weight, rate._faster, rate._count, rate._observed_s = (column.copy() for column in columns)
        return rate

    def between_s(self, now_s: float) -> float:
        """Seconds between two failures to expect now: 1 / the mean of the rate."""
        open_s = max(0.0, now_s - self.since_s)
        shape, scale_s = self._posterior()
        log_survival = self._log_weight - shape * np.log1p(open_s / scale_s)
        weight = np.exp(log_survival - log_survival.max())
        return float(weight.sum() / (weight * shape / (scale_s + open_s)).sum())

    def _posterior(self) -> tuple[Floats, Floats]:
        """Shape and scale of the rate's Gamma distribution, by hypothesis."""
        prior_s = PRIOR_FAILURES * self.expected_s / self._faster
        return PRIOR_FAILURES + self._count, prior_s + self._observed_s
