"""The worth of a suggestion after the fact: one score in [0, 1] per kind of action. Pure.

1: hindsight would have suggested the same. 0.5: neither better nor worse than doing nothing. 0: harmful.
docs/policies-scoring.md and ADR-0021 explain each formula. Times are milliseconds per microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from policies.numerics.allocation.stage_balance import StageSituation, improvement
from schemas.changes import ChangeState, Forecast, JobChange, JobObjective
from schemas.fault_choices import FaultAnswer, FaultChoice, FaultOutcome

TOLERANCE = 0.01
"""Share of the best time below which differences are noise of the measurement and count as none."""

SLOW = 1.5
"""An instance that takes this many times its peers' median was rightly avoided."""

LEAST_STEPS = 3
"""Steps that must be measured for a change that was not carried out to be scored."""

Z = 1.96
"""Standard score of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The score with its reason; `score` None: the events do not allow a score."""

    score: float | None
    reason: str

    @property
    def right(self) -> bool | None:
        """Whether it was better than doing nothing, which its confidence predicts."""
        return None if self.score is None else self.score > 0.5


def weights_worth(weights: Mapping[str, float], times: Mapping[str, float]) -> Worth:
    """Compares the shares of one stage with the best ones, for the service times measured then.

    A stage that splits its microbatches by shares w_i takes max(w_i · t_i) per microbatch. The best shares
    are ∝ 1/t_i and take T* = 1 / Σ(1/t_i); equal ones take T₀ = max(t_i) / n. With the regrets a = T₀ − T*
    and b = T − T*, the score is (a + ε) / (a + b + 2ε), ε = 1 % of T*: 1 for the best shares, 0.5 for shares
    as good as equal ones, towards 0 for worse ones.

    Args:
        weights: The suggested weights; an instance that is not named counts 1, as for the orchestrator.
        times: Measured times of each instance that worked in the stage.
    """
    shares = {sid: weights.get(sid, 1.0) for sid in times}
    total = sum(shares.values())
    if len(times) < 2:
        return Worth(None, f"{len(times)} instance measured: nothing to choose from")
    if total <= 0 or not all(math.isfinite(time) and time > 0 for time in times.values()):
        return Worth(None, "no instance with weight was measured")
    best = 1.0 / sum(1.0 / time for time in times.values())
    equal = max(times.values()) / len(times)
    actual = max(shares[sid] / total * time for sid, time in times.items())
    tolerance = TOLERANCE * best
    equal_regret, actual_regret = equal - best, actual - best
    score = (equal_regret + tolerance) / (equal_regret + actual_regret + 2 * tolerance)
    text = (
        f"{actual:.2f} ms a microbatch with these shares, {best:.2f} with the best, "
        f"{equal:.2f} with equal ones"
    )
    return Worth(min(1.0, max(0.0, score)), text)


def avoidance_worth(sid: str, fault: str, time: float | None, peers: Sequence[float]) -> Worth:
    """1 if an instance was rightly avoided, since it faulted or was slow; 0 if it worked well.

    Args:
        sid: The instance.
        fault: Its fault in the window, in words; empty if there was none.
        time: Its service time in the window; None if it did no work.
        peers: Service times of the other instances of its stage.
    """
    if fault:
        return Worth(1.0, f"{sid} {fault}")
    if time is None or not peers:
        return Worth(None, f"{sid} did nothing that could be measured")
    ratio = time / median(peers)
    text = f"{sid} took {ratio:.2f} times what its peers did"
    return Worth(1.0 if ratio >= SLOW else 0.0, text if ratio >= SLOW else f"{text}, and had no fault")


def change_worth(forecast: Forecast, carried_out: JobChange | None) -> Worth | None:
    """Scores a change by the measured gain: 1 for the whole forecast, 0.5 for no gain, 0 if it failed.

    The gain is the saved share of what the forecast's objective counts (`Forecast.measured_saving`).

    Returns:
        None if it was not carried out, or if its effect is not known.
    """
    if carried_out is None:
        return None
    match carried_out.state:
        case ChangeState.FAILED:
            return Worth(0.0, "carried out, and failed")
        case ChangeState.BETTER | ChangeState.NO_BETTER:
            before, after = carried_out.before_s, carried_out.after_s
            if before is None or after is None:
                return None
            gain = forecast.measured_saving(before, after)
            of = "" if forecast.objective is JobObjective.TIME else f" {forecast.objective}"
            forecast_text = f"{forecast.saving:.0%} less{of} was forecast"
            text = f"a step took {before:.3f} s, then {after:.3f} s; {forecast_text}"
            return Worth(_part(gain, forecast.saving), text)
    return None


def premise_worth(forecast: Forecast, steps_s: Sequence[float]) -> Worth:
    """Scores a change that was not carried out by the steps that followed without it.

    What it would have brought is not known; but whether there was anything to gain is. The gain is what the
    forecast step would have saved of the measured ones: 1 if they took as long as the forecast says without
    the change, 0.5 if they were as short without it, less if shorter. It leans on the forecast's time after.

    Args:
        forecast: The forecast of the suggestion.
        steps_s: Measured seconds of the steps while it was valid.
    """
    if len(steps_s) < LEAST_STEPS:
        return Worth(None, f"not carried out, and {len(steps_s)} steps were measured: too few")
    measured = median(steps_s)
    gain = forecast.measured_saving(measured, forecast.step_after_s)
    text = (
        f"not carried out; a step took {measured:.3f} s, {forecast.step_before_s:.3f} s were forecast "
        f"without it and {forecast.step_after_s:.3f} s with it"
    )
    return Worth(_part(gain, forecast.saving), text)


def failures_worth(between_s: float, usual_s: float, seconds: float, failures: int) -> Worth:
    """Scores an expectation of failures by what came, beside the usual one: L / (L + L₀) of Poisson's.

    Args:
        between_s: Seconds between failures as suggested.
        usual_s: The same, if nothing is known of the job.
        seconds: For how long it was followed.
        failures: Failures of the job in that time.
    """
    if seconds <= 0 or between_s <= 0:
        return Worth(None, "not followed for long enough")
    ratio = failures * math.log(usual_s / between_s) - seconds / between_s + seconds / usual_s
    score = 1 / (1 + math.exp(-max(-40.0, min(40.0, ratio))))
    text = f"{failures} failures in {seconds:.0f} s, one every {between_s:.0f} s was expected"
    return Worth(score, text)


def checkpoint_worth(fault: str) -> Worth:
    """1 if a fault followed while the suggestion was valid, else 0: the checkpoint was for nothing."""
    return Worth(1.0, fault) if fault else Worth(0.0, "no fault followed")


def fault_worth(answer: FaultAnswer, choice: FaultChoice) -> Worth:
    """Scores what a module would have done about a fault by the time until a step was committed again.

    With t that time, and u what the orchestrator's usual way costs by the job's forecast, the score is
    u / (u + t): 0.5 for no better, 0 if the instance was waited for in vain. Of a way that was not gone
    nothing is known.
    """
    way = None if answer.action is None else answer.action.action
    if way != choice.way:
        return Worth(None, f"it would {way}; {choice.by} went another way: {choice.way}")
    if way == choice.usual:
        return Worth(None, f"{choice.way} is the usual way")
    usual_s, took_s = choice.costs.of(choice.usual), choice.took_s
    if choice.outcome is FaultOutcome.NO_BETTER and choice.lost:
        return Worth(0.0, f"{choice.way} was in vain")
    if usual_s is None or took_s is None or usual_s + took_s <= 0:
        return Worth(None, f"{choice.way}: {choice.outcome}; nothing to compare it with")
    text = f"training went on after {took_s:.2f} s; {choice.usual} was to cost {usual_s:.2f} s"
    return Worth(usual_s / (usual_s + took_s), text)


def move_worth_by_model(
    forecast: Forecast, stages: Mapping[int, StageSituation], sid: str, to_stage: int, microbatches: int
) -> Worth:
    """Scores a move that was not carried out by the modelled gain, for the service times measured then.

    The model is `stage_balance.improvement`, with which the policy forecasts. A move that was right when it
    was suggested, but whose stage was not the slowest one afterwards, scores low.
    """
    gain = improvement(stages, sid, to_stage, microbatches)
    if gain is None:
        return Worth(None, "not carried out, and not every instance was measured")
    text = f"not carried out; by then measured service times it would have saved {gain:.0%} of a step"
    return Worth(_part(gain, forecast.improvement), f"{text}, {forecast.improvement:.0%} were forecast")


def _part(gain: float, forecast: float) -> float:
    """0.5 for no gain, 1 for the forecast gain, 0 for a loss of the same size."""
    if forecast <= 0:
        return 0.5
    return min(1.0, max(0.0, 0.5 + 0.5 * gain / forecast))


# --- summaries ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The fields of one scored suggestion that summaries need."""

    score: float | None
    right: bool | None
    confidence: float
    adopted: bool
    missed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Figures of many suggestions of one version; NaN if there is nothing to compute a figure from.

    `low`, `high`: 95 % interval of the mean; `right`: share that was better than doing nothing;
    `brier`: mean (confidence − right)², 0.25 for a constant confidence of 0.5;
    `overconfidence`: mean confidence − share that was right; `adopted`: share of all suggestions.
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
    """All figures of one version. Missed faults count only in the mean, with score 0."""
    everything = list(judged)
    suggestions = [item for item in everything if not item.missed]
    scores = [item.score for item in everything if item.score is not None]
    outcomes = [(item.confidence, item.right) for item in suggestions if item.right is not None]
    mean, low, high = interval(scores)
    return Summary(
        suggestions=len(suggestions),
        scored=len(scores),
        missed=len(everything) - len(suggestions),
        mean=mean,
        low=low,
        high=high,
        brier=_mean([(confidence - right) ** 2 for confidence, right in outcomes]),
        right=_mean([float(right) for _, right in outcomes]),
        overconfidence=_mean([confidence - right for confidence, right in outcomes]),
        adopted=_mean([float(item.adopted) for item in suggestions]),
    )


def interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval, cut to [0, 1].

    The interval is normal, with one more observation of variance 0.25, the largest possible in [0, 1]: three
    equal scores do not mean that the next one is equal as well.
    """
    if not scores:
        return math.nan, math.nan, math.nan
    mean = fmean(scores)
    variance = (sum((score - mean) ** 2 for score in scores) + 0.25) / len(scores)
    half = Z * math.sqrt(variance / len(scores))
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
