"""How often a job fails, while that changes (pure): Bayesian change-point detection over the gaps.

Between changes failures are a Poisson process of unknown rate; at any failure the rate may have become
another one. Held is, for each possible time of the last change, how likely it is, and the Gamma posterior
of the rate since then (conjugate: failures and time simply add up). The gap that is still open counts as
survival: it makes a high rate, and any history that implies one, less likely by the hour.

Adams & MacKay (2007), arXiv:0710.3742. The interval between checkpoints follows from the rate by Daly's
formula, doi:10.1016/j.future.2004.11.016, which the orchestrator holds (`checkpoint_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR_FAILURES = 1.0
"""Failures that the expectation before any weighs as much as, at the start and after each change."""
CHANGE = 0.04
"""Chance that a failure begins another regime: one in 25."""
_FASTER = 4.0 ** np.arange(6)
_CHANCE = 8.0 ** -np.arange(6)
CHANCE = _CHANCE / _CHANCE.sum()
FASTER = _FASTER / (CHANCE * _FASTER).sum()
"""A regime may be a thousand times as bad as expected: the prior is a mixture of one near the expectation and
ever less likely ones, four times as fast each, whose mean is the expectation. A single Gamma would hold on to
an expectation of days through a dozen failures within an hour."""
KEPT = 120
"""Hypotheses (time of the last change, prior) that are held; the least likely goes."""


@dataclass(slots=True)
class FailureRate:
    """Failures of one job. `expected_s`: seconds between two, before anything is known."""

    expected_s: float
    since_s: float = 0.0
    """When the last failure was, or the observation began."""
    failures: int = 0
    _log_weight: Floats = field(default_factory=lambda: np.log(CHANCE))
    _faster: Floats = field(default_factory=lambda: FASTER)
    _count: Floats = field(default_factory=lambda: np.zeros(len(FASTER)))
    _seen_s: Floats = field(default_factory=lambda: np.zeros(len(FASTER)))

    def failed(self, at_s: float) -> None:
        """There was a failure; times before the last one are taken as the same moment."""
        gap_s = max(0.0, at_s - self.since_s)
        shape, scale_s = self._posterior()
        # The Lomax density of a gap under a Gamma rate.
        said = np.log(shape) - np.log(scale_s) - (shape + 1) * np.log1p(gap_s / scale_s)
        weight = self._log_weight + said
        weight = weight - np.logaddexp.reduce(weight) + np.log1p(-CHANGE)
        count, seen_s, faster = self._count + 1, self._seen_s + gap_s, self._faster
        if len(count) + len(FASTER) > KEPT:
            likely = np.sort(np.argsort(weight)[len(count) + len(FASTER) - KEPT :])
            weight, count, seen_s, faster = weight[likely], count[likely], seen_s[likely], faster[likely]
        # A change is at the failure: the gap before it belongs to the regime before.
        nothing = np.zeros(len(FASTER))
        self._log_weight = np.append(weight, np.log(CHANGE) + np.log(CHANCE))
        self._count, self._seen_s = np.append(count, nothing), np.append(seen_s, nothing)
        self._faster = np.append(faster, FASTER)
        self.since_s, self.failures = max(self.since_s, at_s), self.failures + 1

    def between_s(self, now_s: float) -> float:
        """Seconds between two failures to be expected now: 1 / the mean of the rate."""
        open_s = max(0.0, now_s - self.since_s)
        shape, scale_s = self._posterior()
        survived = self._log_weight - shape * np.log1p(open_s / scale_s)
        weight = np.exp(survived - survived.max())
        return float(weight.sum() / (weight * shape / (scale_s + open_s)).sum())

    def _posterior(self) -> tuple[Floats, Floats]:
        """Shape and scale of the rate's Gamma, by hypothesis."""
        prior_s = PRIOR_FAILURES * self.expected_s / self._faster
        return PRIOR_FAILURES + self._count, prior_s + self._seen_s
