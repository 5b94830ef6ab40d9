"""A stable version and a candidate, judged request by request (pure; ADR-0134).

Four tests share one rate of false alarms: failures, time to the first token, time per further token, and
quality. Requests are compared with those of their own block only, so what hits both versions says nothing. A
judge takes constant time and memory per request, its state is plain data, and the same requests in the same
order give the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from typing_extensions import TypedDict

from policies.numerics.sequential.permutation_test import (
    PermutationTest,
    PermutationTestState,
    marks,
    normal_scores,
    worst_tenth,
)

FAILURE_TILTS = (0.7, 2.0, 3.2, 5.0)
"""Logarithms of odds ratios: from twice as many failures to a hundred times as many."""
RANK_TILTS = (0.25, 0.6, 1.2, 2.2)
"""Shifts in standard deviations of one version's outcomes."""
SMALLEST_BLOCK = 16
"""Requests of a block where both versions have many: fewer would leave many blocks to one version alone."""
LARGEST_BLOCK = 200
"""Requests of a block where one version has few: more would not be simultaneous."""
KEY_SLOTS = 1 << 16
"""Keys that are told apart; two in one slot count once, so half of them full is the most."""


class Measure(StrEnum):
    """What versions are compared by."""

    FAILURES = "failures"
    FIRST_TOKEN = "first_token"
    PER_TOKEN = "per_token"
    SCORE = "score"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutcome:
    """How one request ended.

    Raises:
        ValueError: A time is negative or a figure not finite: such an answer is a failure (`ok=False`).
    """

    version: str
    ok: bool
    """False where the version is to blame; a request that was refused as wrong is no outcome."""
    first_token_s: float | None = None
    per_token_s: float | None = None
    score: float | None = None
    """Quality, larger is better: minus the NLL per token, a user's feedback."""
    key: int | None = None
    """Hash of what the version was chosen by, if several requests share it, as all those of a user."""

    def __post_init__(self) -> None:
        for name, value in (("first_token_s", self.first_token_s), ("per_token_s", self.per_token_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} {value} of {self.version} is no time in seconds")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"score {self.score} of {self.version} is not finite: count it as a failure")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRules:
    """How sure a judge has to be. The levels and that of the orchestrator's hard rule (0.0004) add up to
    0.005.
    """

    failures: float = 0.0036
    first_token: float = 0.0002
    per_token: float = 0.0002
    score: float = 0.0006
    latency_margin: float = 1.1
    """Times the stable version's latency that the candidate may take: less is not worth going back for."""
    score_margin: float = 0.0
    """What the candidate's score may be lower by, in the score's unit."""
    first_round: int = 1000
    """Requests to the candidate in the first round; each later round has twice as many as the one before."""

    def __post_init__(self) -> None:
        if not all(0 < self.level(measure) < 1 for measure in Measure):
            raise ValueError(f"levels of {self} have to be between 0 and 1")
        if self.latency_margin < 1 or self.score_margin < 0 or self.first_round < 1:
            raise ValueError(f"margins of {self} forgive something, and a round has requests")

    def level(self, measure: Measure) -> float:
        """The chance that this measure ever condemns a version that is no worse."""
        return {
            Measure.FAILURES: self.failures,
            Measure.FIRST_TOKEN: self.first_token,
            Measure.PER_TOKEN: self.per_token,
            Measure.SCORE: self.score,
        }[measure]


@dataclass(frozen=True, kw_only=True, slots=True)
class Condemnation:
    """Why the candidate has to go.

    Attributes:
        requests: To the candidate until then, those of all rounds.
        evidence: How unlikely this is of a version that is no worse, as 1 in so many.
    """

    measure: Measure
    requests: int
    evidence: float
    reason: str


OutcomeRow = tuple[bool, float, float | None, float | None, float | None]
"""Whether an outcome is the candidate's; then how bad it is by each `Measure`, in order, None: not known."""


class Sums(TypedDict):
    """Of one version and measure in this round: number of outcomes, and what they add up to."""

    count: int
    total: float


class VersionJudgeState(TypedDict):
    """A judge as plain data."""

    share: float
    requests: int
    round_requests: int
    tests: dict[str, PermutationTestState]
    sums: dict[str, list[Sums]]
    block: list[OutcomeRow]
    keys: str


@dataclass(slots=True)
class VersionJudge:
    """Call `add` with each outcome of the two versions, `add_pair` with mirrored ones; either may condemn."""

    stable: str
    candidate: str
    share: float
    """The candidate's part of the traffic of both, between 0 and 1."""
    rules: JudgeRules = JudgeRules()
    requests: int = 0
    """To the candidate so far."""
    condemnation: Condemnation | None = None
    _tests: dict[Measure, PermutationTest] = field(init=False)
    _sums: dict[Measure, list[Sums]] = field(init=False)
    _block: list[OutcomeRow] = field(default_factory=list)
    _round_requests: int = 0
    _keys: bytearray = field(default_factory=lambda: bytearray(KEY_SLOTS // 8))
    _known: int = 0
    """Slots of keys that are taken."""

    def __post_init__(self) -> None:
        _check_share(self.share)
        self._tests = {
            measure: PermutationTest(self.rules.level(measure), RANK_TILTS, (normal_scores, worst_tenth))
            for measure in Measure
        }
        self._tests[Measure.FAILURES] = PermutationTest(self.rules.failures, FAILURE_TILTS, (marks,))
        self._sums = _no_sums()

    def set_share(self, share: float) -> None:
        """Takes a change of weights: the open block is put aside, since its choices were not equally
        likely.
        """
        _check_share(share)
        self.share = share
        self._block.clear()

    def add(self, outcome: RequestOutcome) -> Condemnation | None:
        """Takes an outcome; those of other versions say nothing. Returns the first condemnation from then
        on.
        """
        if outcome.version not in (self.stable, self.candidate) or self.condemnation is not None:
            return self.condemnation
        candidate = outcome.version == self.candidate
        self.requests += candidate
        self._round_requests += candidate
        if self._counts(outcome.key):
            self._block.append(_row(outcome, candidate))
        size = math.ceil(1 / min(self.share, 1 - self.share))
        if len(self._block) >= max(SMALLEST_BLOCK, min(size, LARGEST_BLOCK)):
            self._close(self._block)
            self._block = []
        if self._round_requests >= self.rules.first_round * 2 ** (self._tests[Measure.FAILURES].round - 1):
            self._begin_round()
        return self.condemnation

    def add_pair(self, stable: RequestOutcome, candidate: RequestOutcome) -> Condemnation | None:
        """Takes a mirrored request: both versions answered it. Its times say nothing, since nobody waited.

        Raises:
            ValueError: The outcomes are not of the two versions.
        """
        if (stable.version, candidate.version) != (self.stable, self.candidate):
            raise ValueError(f"a pair of {stable.version} and {candidate.version}: judged are {self.pair}")
        if self.condemnation is None:
            self.requests += 1
            self._round_requests += 1
            rows = [_row(stable, False), _row(candidate, True)]
            self._close([(chosen, failed, None, None, badness) for chosen, failed, _, _, badness in rows])
        return self.condemnation

    @property
    def pair(self) -> str:
        return f"{self.stable} and {self.candidate}"

    def log_wealth(self, measure: Measure) -> float:
        """Natural logarithm of the evidence against the candidate, in this round; 0 at its beginning."""
        return self._tests[measure].log_wealth

    def as_data(self) -> VersionJudgeState:
        return VersionJudgeState(
            share=self.share,
            requests=self.requests,
            round_requests=self._round_requests,
            tests={measure.value: test.as_data() for measure, test in self._tests.items()},
            sums={measure.value: [Sums(**each) for each in sums] for measure, sums in self._sums.items()},
            block=list(self._block),
            keys=self._keys.hex() if any(self._keys) else "",
        )

    def restore(self, state: VersionJudgeState) -> None:
        """Goes on from what `as_data` returned, of a judge that had not condemned.

        Raises:
            ValueError: It is none.
        """
        _check_share(state["share"])
        keys = bytearray.fromhex(state["keys"]) or bytearray(KEY_SLOTS // 8)
        if len(keys) != KEY_SLOTS // 8 or set(state["tests"]) != set(Measure):
            raise ValueError(f"the state of a judge of {self.pair} has other keys or measures")
        for measure, test in self._tests.items():
            test.restore(state["tests"][measure.value])
        self.share, self.requests, self._keys = state["share"], state["requests"], keys
        self._known = int.from_bytes(keys, "big").bit_count()
        self._round_requests = state["round_requests"]
        self._sums = {measure: [Sums(**each) for each in state["sums"][measure.value]] for measure in Measure}
        self._block = [(row[0], row[1], row[2], row[3], row[4]) for row in state["block"]]

    def _counts(self, key: int | None) -> bool:
        """Whether a request is the first of its key in this round. A key was given a version once, by one
        draw; so a user whose requests are slow everywhere would count against whichever version they met,
        again and again.
        """
        if key is None:
            return True
        place, bit = divmod(key % KEY_SLOTS, 8)
        if self._keys[place] >> bit & 1:
            return False
        if self._known >= KEY_SLOTS // 2:  # of so many keys, one that comes again weighs nothing
            self._forget_keys()
        self._keys[place] |= 1 << bit
        self._known += 1
        return True

    def _forget_keys(self) -> None:
        self._keys, self._known = bytearray(KEY_SLOTS // 8), 0

    def _close(self, block: list[OutcomeRow]) -> None:
        """Lets each test bet on a block, and condemns by the first that rejects."""
        for column, measure in enumerate(Measure, 1):
            rows = [(row[0], value) for row in block if (value := row[column]) is not None]
            if not rows:
                continue
            chosen = np.array([row[0] for row in rows])
            values = np.array([row[1] for row in rows])
            count, total = int(chosen.sum()), float(values[chosen].sum())
            for sums, more, added in (
                (self._sums[measure][0], chosen.size - count, float(values.sum()) - total),
                (self._sums[measure][1], count, total),
            ):
                sums["count"], sums["total"] = sums["count"] + more, sums["total"] + added
            if not 0 < count < chosen.size:
                continue
            test = self._tests[measure]
            test.bet(np.where(chosen, values, values + self._margin(measure)), chosen)
            if self.condemnation is None and test.rejects:
                self.condemnation = self._condemn(measure)

    def _margin(self, measure: Measure) -> float:
        if measure is Measure.FAILURES:
            return 0.0
        return self.rules.score_margin if measure is Measure.SCORE else math.log(self.rules.latency_margin)

    def _condemn(self, measure: Measure) -> Condemnation:
        test = self._tests[measure]
        stable, candidate = self._sums[measure]
        told = _WORDS[measure](self.candidate, candidate, self.stable, stable)
        evidence = math.exp(min(700.0, test.log_wealth)) * test.level / test.alpha
        return Condemnation(
            measure=measure,
            requests=self.requests,
            evidence=evidence,
            reason=f"{told}; 1 in {evidence:,.0f} if it were no worse",
        )

    def _begin_round(self) -> None:
        for test in self._tests.values():
            test.begin_round()
        self._round_requests, self._sums = 0, _no_sums()
        self._forget_keys()
        self._block.clear()


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(
            f"the candidate's share {share} is not between 0 and 1: there is nobody to compare with"
        )


def _no_sums() -> dict[Measure, list[Sums]]:
    return {measure: [Sums(count=0, total=0.0), Sums(count=0, total=0.0)] for measure in Measure}


def _row(outcome: RequestOutcome, candidate: bool) -> OutcomeRow:
    """An outcome as numbers of which larger ones are worse, in the order of `Measure`; times as
    logarithms.
    """
    score = None if outcome.score is None else -outcome.score
    return candidate, float(not outcome.ok), _log(outcome.first_token_s), _log(outcome.per_token_s), score


def _log(time_s: float | None) -> float | None:
    return None if time_s is None else math.log(max(time_s, 1e-9))


def _failures(candidate: str, its: Sums, stable: str, others: Sums) -> str:
    return (
        f"{its['total']:.0f} of {its['count']} requests to {candidate} failed, "
        f"{others['total']:.0f} of {others['count']} to {stable} in the same time"
    )


def _times(what: str) -> Callable[[str, Sums, str, Sums], str]:
    def told(candidate: str, its: Sums, stable: str, others: Sums) -> str:
        return (
            f"{what} {_typical(its):.3g} s at {candidate}, {_typical(others):.3g} s at {stable} "
            f"in the same time (geometric means of {its['count']} and {others['count']} requests)"
        )

    return told


def _scores(candidate: str, its: Sums, stable: str, others: Sums) -> str:
    return (
        f"mean score {-its['total'] / its['count']:.4g} of {its['count']} requests to {candidate}, "
        f"{-others['total'] / others['count']:.4g} of {others['count']} to {stable} in the same time"
    )


def _typical(sums: Sums) -> float:
    return math.exp(sums["total"] / sums["count"]) if sums["count"] else math.nan


_WORDS: dict[Measure, Callable[[str, Sums, str, Sums], str]] = {
    Measure.FAILURES: _failures,
    Measure.FIRST_TOKEN: _times("first token after"),
    Measure.PER_TOKEN: _times("each token in"),
    Measure.SCORE: _scores,
}
