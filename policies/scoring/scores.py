"""What a suggestion was worth, by what then happened: one score in [0, 1] per kind of action. Pure.

1: hindsight would have suggested the same. 0.5: no better, and no worse, than doing nothing. 0: harmful.
Each formula, and why, is in docs/policies-scoring.md and ADR-0021. Times are milliseconds per microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from policies.numerics.stage_balance import StageSituation, improvement
from schemas.stage_move import MoveForecast, MoveState, StageMove

TOLERANCE = 0.01
"""Part of the best time: smaller differences are noise of the measurement, and count as none."""

SLOW = 1.5
"""An instance that takes this many times its peers' median was rightly avoided."""

Z = 1.96
"""Of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The score with its reason; `score` None: what happened says nothing of it."""

    score: float | None
    reason: str

    @property
    def right(self) -> bool | None:
        """Better than doing nothing: what its confidence was about."""
        return None if self.score is None else self.score > 0.5


def weights_worth(weights: Mapping[str, float], times: Mapping[str, float]) -> Worth:
    """Shares of one stage against the best ones, for the service times that were then measured.

    A stage that splits its microbatches by shares w_i takes max(w_i · t_i) per microbatch. The best shares
    are ∝ 1/t_i and take T* = 1 / Σ(1/t_i); equal ones take T₀ = max(t_i) / n. With the regrets a = T₀ − T*
    and b = T − T*, the score is (a + ε) / (a + b + 2ε), ε = 1 % of T*: 1 for the best shares, 0.5 for what is
    as good as equal shares, towards 0 for what is worse.

    Args:
        weights: as suggested; an instance that is not named counts 1, as for the orchestrator.
        times: measured, of each instance that worked in the stage.
    """
    wanted = {sid: weights.get(sid, 1.0) for sid in times}
    total = sum(wanted.values())
    if len(times) < 2:
        return Worth(None, f"{len(times)} instance measured: nothing to choose from")
    if total <= 0 or not all(math.isfinite(time) and time > 0 for time in times.values()):
        return Worth(None, "no instance with weight was measured")
    best = 1.0 / sum(1.0 / time for time in times.values())
    equal = max(times.values()) / len(times)
    got = max(wanted[sid] / total * time for sid, time in times.items())
    tolerance = TOLERANCE * best
    gained, lost = equal - best, got - best
    score = (gained + tolerance) / (gained + lost + 2 * tolerance)
    text = (
        f"{got:.2f} ms a microbatch with these shares, {best:.2f} with the best, {equal:.2f} with equal ones"
    )
    return Worth(min(1.0, max(0.0, score)), text)


def avoidance_worth(sid: str, fault: str, time: float | None, peers: Sequence[float]) -> Worth:
    """Whether an instance was rightly avoided: it faulted, or was slow; 0 if it was well.

    Args:
        sid: the instance.
        fault: what was found of it in the window; empty if nothing was.
        time: its service time then; None if it did no work.
        peers: service times of the others of its stage.
    """
    if fault:
        return Worth(1.0, f"{sid} {fault}")
    if time is None or not peers:
        return Worth(None, f"{sid} did nothing that could be measured")
    ratio = time / median(peers)
    text = f"{sid} took {ratio:.2f} times what its peers did"
    return Worth(1.0 if ratio >= SLOW else 0.0, text if ratio >= SLOW else f"{text}, and had no fault")


def move_worth(forecast: MoveForecast, carried_out: StageMove | None) -> Worth | None:
    """By the gain that was measured: 1 for all of what was forecast, 0.5 for none, 0 if it failed.

    Returns:
        None: it was not carried out, or its effect is not known.
    """
    if carried_out is None:
        return None
    match carried_out.state:
        case MoveState.FAILED:
            return Worth(0.0, "carried out, and failed")
        case MoveState.BETTER | MoveState.NO_BETTER:
            before, after = carried_out.before_s, carried_out.after_s
            if before is None or after is None:
                return None
            gain = 1.0 - after / before
            told = f"{forecast.improvement:.0%} less was forecast"
            text = f"a step took {before:.3f} s, then {after:.3f} s; {told}"
            return Worth(_part(gain, forecast.improvement), text)
    return None


def move_worth_by_model(
    forecast: MoveForecast, stages: Mapping[int, StageSituation], sid: str, to_stage: int, microbatches: int
) -> Worth:
    """The same for a move that was not carried out: the gain by the service times that were then measured.

    `improvement` of the model is what `rebalancing` forecasts with: a move that was right when it was
    suggested, but whose stage was not the slowest one afterwards, scores low.
    """
    gain = improvement(stages, sid, to_stage, microbatches)
    if gain is None:
        return Worth(None, "not carried out, and not every instance was measured")
    text = f"not carried out; by then measured service times it would have saved {gain:.0%} of a step"
    return Worth(_part(gain, forecast.improvement), f"{text}, {forecast.improvement:.0%} were forecast")


def _part(gain: float, forecast: float) -> float:
    """0.5 for no gain, 1 for what was forecast, 0 for a loss of the same size."""
    if forecast <= 0:
        return 0.5
    return min(1.0, max(0.0, 0.5 + 0.5 * gain / forecast))


# --- many of them ------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One suggestion with its score, as far as summaries need it."""

    score: float | None
    right: bool | None
    confidence: float
    adopted: bool
    missed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Of many suggestions of one version. NaN where there is nothing to compute it from.

    `low`, `high`: 95 % interval of the mean; `right`: part that was better than doing nothing;
    `brier`: mean (confidence − right)², 0.25 for always saying 0.5;
    `overconfidence`: mean confidence − part that was right; `adopted`: part of all suggestions.
    """

    suggestions: int
    scored: int
    missed: int
    mean: float
    low: float
    high: float
    brier: float
    right: float
    overconfidence: float
    adopted: float


def summarise(judged: Iterable[Judged]) -> Summary:
    """All figures of one version. What was missed counts in the mean, with score 0, and nowhere else."""
    everything = list(judged)
    said = [one for one in everything if not one.missed]
    scores = [one.score for one in everything if one.score is not None]
    told = [(one.confidence, one.right) for one in said if one.right is not None]
    mean, low, high = interval(scores)
    return Summary(
        suggestions=len(said),
        scored=len(scores),
        missed=len(everything) - len(said),
        mean=mean,
        low=low,
        high=high,
        brier=_mean([(confidence - right) ** 2 for confidence, right in told]),
        right=_mean([float(right) for _, right in told]),
        overconfidence=_mean([confidence - right for confidence, right in told]),
        adopted=_mean([float(one.adopted) for one in said]),
    )


def interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval, cut to [0, 1].

    Normal, with the variance of one more observation at the edge (0.25, the largest there is in [0, 1]):
    three equal scores do not mean that the next one is equal as well.
    """
    if not scores:
        return math.nan, math.nan, math.nan
    mean = fmean(scores)
    variance = (sum((score - mean) ** 2 for score in scores) + 0.25) / len(scores)
    half = Z * math.sqrt(variance / len(scores))
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
