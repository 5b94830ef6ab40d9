"""What a validation came to: the metrics of each set, added exactly. Pure.

Sums are those of `math.fsum` over the microbatches in order: correctly rounded, so that neither the order of
arrival nor who computed what changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.evaluation_sets import evaluation_sets
from schemas.job import JobSpec
from schemas.job_file.training import TrainingSpec
from schemas.step import MicrobatchClaim


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A validation's values.

    `loss` is that of the first set. `values` has each metric of the first set by its name, and with several
    sets each set's as `set/metric`; those that are not finite are left out, and `problems` says so in a line
    each.
    """

    loss: float
    values: dict[str, float]
    problems: tuple[str, ...] = ()


def evaluate(spec: JobSpec, claims: Mapping[int, MicrobatchClaim], step: int) -> Evaluation:
    """The values of a validation at `step`, from the claims of all its microbatches, by number."""
    values: dict[str, float] = {}
    problems: list[str] = []
    first_loss, begin = math.nan, 0
    sets = evaluation_sets(spec)
    for place, (name, count) in enumerate(sets):
        own = [claims[number] for number in range(begin, begin + count)]
        begin += count
        found, wrong = _values(spec.training, own)
        problems += [f"{text} of set {name} in the validation at step {step}: left out" for text in wrong]
        if place == 0:
            first_loss = _mean_loss(own)
            values |= found
        if len(sets) > 1:
            values |= {f"{name}/{metric}": value for metric, value in found.items()}
    return Evaluation(loss=first_loss, values=values, problems=tuple(problems))


def _values(training: TrainingSpec, claims: list[MicrobatchClaim]) -> tuple[dict[str, float], list[str]]:
    loss = _mean_loss(claims)
    found = {"loss": loss}
    if "perplexity" in training.evaluation.metrics:
        found["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    for metric in _in_order(name for claim in claims for name in claim.metrics):
        pairs = [claim.metrics[metric] for claim in claims if metric in claim.metrics]
        found[metric] = _quotient(_sum(total for total, _ in pairs), _sum(count for _, count in pairs))
    wrong = [_described(metric, value, claims) for metric, value in found.items() if not math.isfinite(value)]
    return {metric: value for metric, value in found.items() if math.isfinite(value)}, wrong


def _described(metric: str, value: float, claims: list[MicrobatchClaim]) -> str:
    for number, claim in enumerate(claims):
        pair = claim.metrics.get(metric, (claim.loss or 0.0, claim.weight))
        if not all(math.isfinite(each) for each in pair):
            return f"metric {metric} is ({pair[0]}, {pair[1]}) at microbatch {number}"
    return f"metric {metric} is {value}"


def _mean_loss(claims: list[MicrobatchClaim]) -> float:
    weight = _sum(claim.weight for claim in claims)
    return _sum(claim.loss for claim in claims if claim.loss is not None) / (weight or 1.0)


def _sum(values: Iterable[float]) -> float:
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
        return math.nan


def _quotient(total: float, count: float) -> float:
    return total / count if count else math.nan


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(set(names))
