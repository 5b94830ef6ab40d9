"""What several answers to one request amount to (pure; ADR-0136).

`first` and `vote` take whole answers, `weighted` and `attention` the distributions of the next token, in
lock-step. A result depends on who answered and not on the order in which they did: sums go by version, in
float64. It says who answered and who is missing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from schemas.errors import BadInput, Unavailable

Distribution = npt.NDArray[np.float64]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionAnswer(Generic[Value]):
    """What one version (or replica) answered.

    Attributes:
        weight: Its say; larger counts more. Not negative.
        answered_s: When, on the asker's clock, in seconds.
    """

    version: str
    value: Value
    weight: float = 1.0
    answered_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregatedAnswer(Generic[Value]):
    """The one answer.

    Attributes:
        answered_by: Versions whose answers are in it, sorted: the header `dmsc-answered-by`.
        missing: Versions that were asked and are not in it, sorted.
        shares: What part of the result each version of `answered_by` had; they add up to 1.
    """

    value: Value
    answered_by: tuple[str, ...]
    missing: tuple[str, ...]
    shares: Mapping[str, float]


def first(answers: Sequence[VersionAnswer[Value]], asked: Collection[str]) -> AggregatedAnswer[Value]:
    """The answer that came first; of those at the same time the one of larger weight, then of the lesser
    name.

    Raises:
        Unavailable: There is none.
        BadInput: It is of nobody who was asked.
    """
    _check_answers(answers, asked, least=1)
    won = min(answers, key=lambda answer: (answer.answered_s, -answer.weight, answer.version))
    return _answer(won.value, {won.version: 1.0}, asked)


def vote(
    answers: Sequence[VersionAnswer[Value]],
    asked: Collection[str],
    *,
    choice_of: Callable[[Value], str | None],
    min_voters: int = 1,
) -> AggregatedAnswer[str]:
    """The choice with the largest sum of weights; equal sums go to the heaviest single voter, then to the
    lesser version name.

    Args:
        choice_of: Reads an answer's choice, as one of `EXTRACTORS` does. None, or an error of it, is no vote.
        min_voters: Fewest valid votes.

    Raises:
        Unavailable: Fewer voted.
    """
    _check_answers(answers, asked, least=0)
    ballots: dict[str, list[VersionAnswer[Value]]] = defaultdict(list)
    for answer in answers:
        if (choice := _choice(choice_of, answer.value)) is not None:
            ballots[choice].append(answer)
    voters = sorted(voter.version for voted in ballots.values() for voter in voted)
    if len(voters) < max(1, min_voters):
        silent = sorted(set(asked) - set(voters))
        raise Unavailable(
            f"{len(voters)} of {len(asked)} versions voted, {max(1, min_voters)} have to; without a vote: "
            f"{', '.join(silent) or 'none'}: lower min_voters or give them more time"
        )

    def standing(choice: str) -> tuple[float, float, str]:
        heaviest = min(ballots[choice], key=lambda voter: (-voter.weight, voter.version))
        return -_sum_of_weights(ballots[choice]), -heaviest.weight, heaviest.version

    won = min(ballots, key=standing)
    everyone = [voter for voted in ballots.values() for voter in voted]
    return _answer(won, _shares({voter.version: voter.weight for voter in everyone}), asked)


def weighted(
    answers: Sequence[VersionAnswer[Distribution]], asked: Collection[str], *, min_voters: int = 1
) -> AggregatedAnswer[Distribution]:
    """Σ wᵥ pᵥ over the versions that answered, their weights scaled to add up to 1; `(…, vocabulary)`
    float64.

    Raises:
        Unavailable: Too few answered.
        BadInput: Shapes differ, a value is no probability, or all weights are 0.
    """
    ordered = _distributions(answers, asked, min_voters)
    shares = _shares({answer.version: answer.weight for answer in ordered})
    mixed = np.zeros(ordered[0].value.shape)
    for answer in ordered:
        mixed += shares[answer.version] * answer.value
    return _answer(mixed, shares, asked)


def attention(
    answers: Sequence[VersionAnswer[Distribution]],
    asked: Collection[str],
    *,
    temperature: float = 1.0,
    min_voters: int = 1,
) -> AggregatedAnswer[Distribution]:
    """The same with weights softmax(ln wᵥ − Hᵥ/τ) for each position: who is surer (less entropy H, in nats)
    has more say.

    Args:
        temperature: τ in nats; small: the surest alone, large: as `weighted`.

    Raises:
        Unavailable: As `weighted`.
        BadInput: As `weighted`, or τ is not positive.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise BadInput(f"temperature {temperature} of attention: it has to be above 0 nats")
    ordered = _distributions(answers, asked, min_voters)
    says = _shares({answer.version: answer.weight for answer in ordered})
    voices = [answer for answer in ordered if says[answer.version] > 0]
    logits = np.stack(
        [math.log(says[answer.version]) - _entropy(answer.value) / temperature for answer in voices]
    )
    attended = np.exp(logits - logits.max(axis=0))
    total = np.zeros(attended.shape[1:])
    for each in attended:  # one after the other: the order of a library's sum is its own
        total = total + each
    mixed = np.zeros(ordered[0].value.shape)
    shares = {answer.version: 0.0 for answer in ordered}
    for answer, each in zip(voices, attended, strict=True):
        mixed += (each / total)[..., None] * answer.value
        shares[answer.version] = float((each / total).mean())
    return _answer(mixed, shares, asked)


def whole_text(text: str) -> str | None:
    """The choice of an answer that is one: its words in lower case, however they are spaced."""
    return " ".join(text.split()).casefold() or None


def last_number(text: str) -> str | None:
    """The choice of an answer that ends in a result: its last number; 1,000.50 and 1000.5 are one choice."""
    found = _NUMBER.findall(text)
    return f"{float(found[-1].replace(',', '')):.12g}" if found else None


_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "whole_text": whole_text,
    "last_number": last_number,
}
"""What a service's file may name for `vote`; a user's own code is not run where answers meet."""


def _choice(choice_of: Callable[[Value], str | None], value: Value) -> str | None:
    try:
        return choice_of(value)
    except Exception:  # an answer that it cannot read is one without a vote, and ends no request
        return None


def _distributions(
    answers: Sequence[VersionAnswer[Distribution]], asked: Collection[str], least: int
) -> list[VersionAnswer[Distribution]]:
    """The answers in order of their versions."""
    _check_answers(answers, asked, least=max(1, least))
    ordered = sorted(answers, key=lambda answer: answer.version)
    shape = ordered[0].value.shape
    for answer in ordered:
        if answer.value.shape != shape or not answer.value.shape:
            raise BadInput(
                f"{answer.version} has {answer.value.shape} probabilities, {ordered[0].version} {shape}: "
                "only versions with one tokenizer can be mixed"
            )
        sums = answer.value.sum(axis=-1)
        if not (
            np.isfinite(answer.value).all() and (answer.value >= 0).all() and (abs(sums - 1) < 1e-4).all()
        ):
            raise BadInput(f"{answer.version} gave no probabilities: leave it out, and count a failure")
    return ordered


def _check_answers(answers: Sequence[VersionAnswer[Value]], asked: Collection[str], *, least: int) -> None:
    versions = [answer.version for answer in answers]
    if strange := sorted(set(versions) - set(asked)):
        raise BadInput(f"{', '.join(strange)} was not asked: asked were {', '.join(sorted(asked))}")
    if len(set(versions)) < len(versions):
        raise BadInput(f"{', '.join(sorted(versions))}: a version answered twice")
    for answer in answers:
        if not (math.isfinite(answer.weight) and answer.weight >= 0):
            raise BadInput(f"weight {answer.weight} of {answer.version}: it has to be 0 or more")
    if len(versions) < least:
        missing = sorted(set(asked) - set(versions))
        raise Unavailable(
            f"{len(versions)} of {len(asked)} versions answered, {least} have to; missing: "
            f"{', '.join(missing) or 'none'}: lower min_voters or give them more time"
        )


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    if total <= 0:
        raise BadInput(f"the weights of {', '.join(sorted(weights))} are all 0: give one of them a weight")
    return {version: weights[version] / total for version in sorted(weights)}


def _sum_of_weights(voters: Sequence[VersionAnswer[Value]]) -> float:
    return math.fsum(voter.weight for voter in voters)


def _entropy(probabilities: Distribution) -> Distribution:
    """In nats, by position: shape without the last dimension."""
    safe = np.where(probabilities > 0, probabilities, 1.0)
    return np.asarray(-(probabilities * np.log(safe)).sum(axis=-1))


def _answer(value: Value, shares: Mapping[str, float], asked: Collection[str]) -> AggregatedAnswer[Value]:
    answered = tuple(sorted(shares))
    return AggregatedAnswer(
        value=value,
        answered_by=answered,
        missing=tuple(sorted(set(asked) - set(answered))),
        shares=dict(shares),
    )
