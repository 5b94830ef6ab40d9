"""Tensors of several answers as one (pure; ADR-0136, ADR-0153). Imported only where some are aggregated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from entities.services.aggregation import (
    AggregatedAnswer,
    Distribution,
    VersionAnswer,
    attention,
    vote,
    weighted,
)
from schemas.aggregation import AggregatedBy, Aggregation
from schemas.errors import BadInput
from schemas.services.prediction import NamedTensor

MOST_CHOSEN = 16_384
"""Most places of one request that are voted on one by one."""
_FLOATS = ("float32", "float64", "float16")


def combined(
    how: Aggregation,
    outputs: Mapping[str, Sequence[NamedTensor]],
    weights: Mapping[str, float],
    asked: Collection[str],
) -> tuple[tuple[NamedTensor, ...], AggregatedBy]:
    """The one answer to a prediction, and whose it is.

    Args:
        how: `vote` gives `choice` (…) int64, the class that won at each place; `weighted` and `attention`
            give `probabilities` (…, classes) float64.
        outputs: Who → all outputs of their model.
        weights: Who → their say.
        asked: All who were asked.

    Raises:
        Unavailable: Fewer than `min_voters` answered.
        BadInput: The output is none of floats, or has another shape at another version.
    """
    found = {who: _output(who, tensors, how.output) for who, tensors in outputs.items()}
    if how.how == "vote":
        return _voted(how, found, weights, asked)
    rows = _probabilities(found)
    answers = [
        VersionAnswer(version=who, value=value, weight=weights[who]) for who, value in sorted(rows.items())
    ]
    mixed = (
        weighted(answers, asked, min_voters=how.min_voters)
        if how.how == "weighted"
        else attention(answers, asked, temperature=how.temperature, min_voters=how.min_voters)
    )
    return (_tensor("probabilities", mixed.value),), answered_by(how, mixed)


def answered_by(how: Aggregation, answer: AggregatedAnswer[Any]) -> AggregatedBy:
    """What is told of whose answer it is."""
    return AggregatedBy(
        how=how.how,
        answered_by=answer.answered_by,
        missing=answer.missing,
        shares={who: round(share, 6) for who, share in answer.shares.items()},
    )


def _voted(
    how: Aggregation,
    found: Mapping[str, Distribution],
    weights: Mapping[str, float],
    asked: Collection[str],
) -> tuple[tuple[NamedTensor, ...], AggregatedBy]:
    choices = {who: value.argmax(axis=-1) for who, value in found.items()}
    shapes = {each.shape for each in choices.values()}
    if len(shapes) > 1:
        raise BadInput(f"versions answer with different shapes: {', '.join(map(str, sorted(shapes)))}")
    shape = next(iter(shapes), ())
    places = int(np.prod(shape)) if shapes else 1
    if places > MOST_CHOSEN:
        raise BadInput(f"{places} votes in one request, but at most {MOST_CHOSEN}: send fewer samples")
    flat = {who: each.reshape(-1) for who, each in choices.items()}
    won = np.empty(places, dtype=np.int64)
    last: AggregatedAnswer[str] | None = None
    for place in range(places):
        ballots = [
            VersionAnswer(version=who, value=int(each[place]), weight=weights[who])
            for who, each in sorted(flat.items())
        ]
        last = vote(ballots, asked, choice_of=str, min_voters=how.min_voters)
        won[place] = int(last.value)
    if last is None:
        raise BadInput("there is nothing to vote on: the answer has no samples")
    return (_tensor("choice", won.reshape(shape)),), answered_by(how, last)


def _output(who: str, tensors: Sequence[NamedTensor], wanted: str | None) -> Distribution:
    names = ", ".join(each.name for each in tensors) or "none"
    named = next((each for each in tensors if wanted in (None, each.name)), None)
    if named is None:
        raise BadInput(f"aggregation.output: {who} has no output {wanted}; it has {names}")
    if named.dtype not in _FLOATS or len(named.shape) < 2:
        raise BadInput(
            f"aggregation.output: {named.name} of {who} is {named.dtype} {named.shape}, no distribution: its "
            f"last dimension has to be that of classes (outputs: {names})"
        )
    value = np.frombuffer(named.data, dtype=named.dtype).reshape(named.shape).astype(np.float64)
    if not np.isfinite(value).all():
        raise BadInput(f"{named.name} of {who} has values that are no numbers")
    return value


def _probabilities(found: Mapping[str, Distribution]) -> dict[str, Distribution]:
    """As they are where all versions give probabilities; else softmax of each one's numbers, in float64."""
    if all(_is_distribution(value) for value in found.values()):
        return dict(found)
    return {who: _softmax(value) for who, value in found.items()}


def _is_distribution(value: Distribution) -> bool:
    return bool((value >= 0).all() and (abs(value.sum(axis=-1) - 1) < 1e-4).all())


def _softmax(value: Distribution) -> Distribution:
    shifted = np.exp(value - value.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def _tensor(name: str, value: np.ndarray) -> NamedTensor:
    return NamedTensor(name=name, dtype=str(value.dtype), shape=value.shape, data=value.tobytes())
