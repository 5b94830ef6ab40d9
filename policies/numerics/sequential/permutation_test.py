"""A sequential permutation test: does the candidate have more of the bad outcomes than chance gives it
(pure).

Simultaneous requests form a block. If it makes no difference who served a request, then each choice of the
candidate's requests among those of the block was equally likely, whatever the outcomes are: heavy-tailed,
drifting, in bursts, or failing together. A bet multiplies the wealth by ``exp(λ Σ aᵢ)``, over the candidate's
scores ``aᵢ``, divided by its mean over all those choices; so it has mean 1, and the chance that the wealth
ever reaches 1/α is at most α (Ville, 1939). For failed or not this is Fisher's exact test as a bet, with odds
exp(λ) against it.

Permutations as bets: N. W. Koning, Online permutation tests and likelihood ratios for testing group
invariance, 2023, arXiv:2310.01153. Blocks of two samples: R. Turner, A. Ly, P. Grünwald, Generic E-variables
for exact sequential k-sample tests that allow for optional stopping, 2021, arXiv:2106.02693. Strata: N.
Mantel, W. Haenszel, 1959. Normal scores: B. L. van der Waerden, 1952. What breaks it is in ADR-0134.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from policies.numerics.features import Floats

Booleans = npt.NDArray[np.bool_]
Scoring = Callable[[Floats], Floats]
"""From a block's values, larger is worse, to scores; both `(requests,)`. It treats all requests alike."""

FIRST_ROUND = 0.9
"""Part of the level for the first round, in which most bad versions show."""


class PermutationTestState(TypedDict):
    """A test as plain data; `wealth` has logarithms, by scoring and tilt."""

    round: int
    wealth: list[float]


@dataclass(slots=True)
class PermutationTest:
    """Bets on blocks, in rounds.

    Each round begins with a wealth of 1, so that a version that becomes bad after long good conduct is found.
    The levels of all rounds add up to `alpha`.
    """

    alpha: float
    """Chance of ever rejecting where the candidate is no worse."""
    tilts: Sequence[float]
    """Effects λ > 0 that are bet on side by side."""
    scorings: Sequence[Scoring]
    """What they are effects on; each pair of scoring and tilt has an equal part of the wealth."""
    round: int = 1
    _wealth: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._wealth = np.zeros((len(self.scorings), len(self.tilts)))

    def bet(self, values: Floats, chosen: Booleans) -> None:
        """Takes one block.

        Args:
            values: How bad each outcome is, shape `(requests,)`.
            chosen: Which of them are the candidate's, same shape.
        """
        if values.size < 2 or values.min() == values.max():
            return
        tilts = np.asarray(self.tilts)
        self._wealth = self._wealth + [
            log_evidence(scoring(values), chosen, tilts) for scoring in self.scorings
        ]

    def begin_round(self) -> None:
        self.round += 1
        self._wealth = np.zeros_like(self._wealth)

    @property
    def log_wealth(self) -> float:
        """Natural logarithm of the wealth of this round: of the evidence against "no worse"."""
        most = float(self._wealth.max())
        return most + math.log(float(np.exp(self._wealth - most).mean()))

    @property
    def level(self) -> float:
        """That of this round."""
        if self.round == 1:
            return FIRST_ROUND * self.alpha
        return (1 - FIRST_ROUND) * self.alpha / (self.round * (self.round - 1))

    @property
    def rejects(self) -> bool:
        """Whether the candidate is worse by the evidence of this round."""
        return self.log_wealth >= -math.log(self.level)

    def as_data(self) -> PermutationTestState:
        return PermutationTestState(round=self.round, wealth=[float(each) for each in self._wealth.flat])

    def restore(self, state: PermutationTestState) -> None:
        """Goes on from what `as_data` returned. Raises `ValueError` if it is none of this test's."""
        wealth = np.asarray(state["wealth"], dtype=np.float64)
        if wealth.size != self._wealth.size or not np.isfinite(wealth).all() or state["round"] < 1:
            raise ValueError(f"a permutation test with {wealth.size} bets, this one has {self._wealth.size}")
        self.round, self._wealth = state["round"], wealth.reshape(self._wealth.shape)


def log_evidence(scores: Floats, chosen: Booleans, tilts: Floats) -> Floats:
    """The logarithm of what a block multiplies each bet's wealth by, shape as `tilts`.

    It is 0 where the block says nothing: all scores are equal, or one side has no request in it.

    Args:
        scores: Shape `(requests,)`.
        chosen: The candidate's requests, same shape.
        tilts: Shape `(bets,)`.
    """
    count = int(chosen.sum())
    if not 0 < count < scores.size or scores.min() == scores.max():
        return np.zeros(tilts.shape)
    if 2 * count > scores.size:  # the same ratio by the smaller side: a few products instead of many
        count, chosen, tilts = scores.size - count, ~chosen, -tilts
    centred = scores - scores.mean()
    evidence: Floats = tilts * centred[chosen].sum() - _log_mean(
        np.sort(centred).tobytes(), count, tilts.tobytes()
    )
    return evidence


@lru_cache(maxsize=4096)
def _log_mean(scores: bytes, count: int, tilts: bytes) -> Floats:
    """The logarithm of the mean of ``exp(λ Σ aᵢ)`` over all choices of `count` scores, by tilt.

    Blocks of one size have the same ranks, and few have more than two failures: so it is nearly always known.
    """
    return np.log(
        _mean_product(np.exp(np.multiply.outer(np.frombuffer(tilts), np.frombuffer(scores))), count)
    )


def _mean_product(lifts: Floats, count: int) -> Floats:
    """The mean over all choices of `count` columns of their product, by row; `lifts` is `(bets,
    requests)`.
    """
    if count == 1:
        return np.asarray(lifts.mean(axis=1))
    if count == 2:
        total, size = lifts.sum(axis=1), lifts.shape[1]
        return np.asarray((total**2 - (lifts**2).sum(axis=1)) / (size * (size - 1)))
    # Elementary symmetric polynomials, each divided by its number of terms, so that they stay near 1.
    means = np.zeros((lifts.shape[0], count + 1))
    means[:, 0] = 1.0
    order = np.arange(1, count + 1)
    for size, column in enumerate(lifts.T, 1):
        means[:, 1:] = ((size - order) * means[:, 1:] + order * column[:, None] * means[:, :-1]) / size
    return means[:, count]


def marks(values: Floats) -> Floats:
    """The values as they are: 1 for an outcome that is bad, 0 for one that is not."""
    return values


def worst_tenth(values: Floats) -> Floats:
    """1 for the worst tenth of the block, at least one: bets on it find a longer tail that leaves the rest
    alone.
    """
    rank = values.size - math.ceil(values.size / 10)
    return np.asarray(values >= np.partition(values, rank)[rank], dtype=np.float64)


def normal_scores(values: Floats) -> Floats:
    """Ranks as quantiles of a normal distribution, ties sharing their mean; shape as `values`: `(requests,)`.

    No scale and no tail is left of the values, and a shift of a log-normal latency is bet on almost as well
    as if its law were known.
    """
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    quantiles = _quantiles(values.size)
    starts = np.flatnonzero(np.concatenate(([True], sorted_values[1:] != sorted_values[:-1])))
    if starts.size < values.size:
        sizes = np.diff(np.append(starts, values.size))
        quantiles = np.repeat(np.add.reduceat(quantiles, starts) / sizes, sizes)
    scores = np.empty(values.size)
    scores[order] = quantiles
    return scores


@lru_cache(maxsize=512)
def _quantiles(count: int) -> Floats:
    normal = NormalDist()
    return np.array([normal.inv_cdf((rank + 0.5) / count) for rank in range(count)])
