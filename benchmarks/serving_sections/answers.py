"""Mixed requests, and an answer beside the answer to the same request alone. Pure.

The models of these sections have tokens of one character: an answer's text has as many as it has tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.emptiness import some
from dmsc.chaos.services.load import LoadAnswer, LoadRequest

FEWEST_TOKENS = 8


def mixed_requests(count: int, context: int, seed: int) -> list[LoadRequest]:
    """Prompts of 4 characters up to half the context, answers of 8 tokens up to the rest.

    Every other one is greedy, the others are drawn, each with its own seed. All have digests.
    """
    text = "".join(each for each in Path(argparse.__file__).read_text() if ord(each) < 128)
    chance = random.Random(seed)
    found = []
    for number in range(count):
        length = chance.randint(4, context // 2)
        begin = chance.randrange(len(text) - length)
        found.append(
            LoadRequest(
                number=number,
                prompt=text[begin : begin + length],
                tokens=chance.randint(FEWEST_TOKENS, context - length - 1),
                temperature=float(number % 2),
                seed=seed + number,
                digests=True,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class AnswerShares:
    """Of some answers: how many tokens are as they were alone, and how many digests of logits.

    `lost`: tokens that did not come; `doubled`: tokens that came beyond the answer alone; `unknown`: digests
    that nobody knew any more, because the server died that had them; `failed`: what clients were told.
    """

    answers: int
    tokens: int
    equal: int
    lost: int
    doubled: int
    digests: int
    equal_digests: int
    unknown: int
    failed: tuple[str, ...]

    @property
    def equal_tokens_percent(self) -> float:
        return 100 * self.equal / self.tokens

    @property
    def equal_digests_percent(self) -> float:
        return 100 * self.equal_digests / self.digests


def beside_alone(answers: Sequence[LoadAnswer], alone: Sequence[LoadAnswer]) -> AnswerShares:
    """The answers, each beside that of its request alone.

    Raises:
        NothingMeasured: There is no answer, or no token or digest to compare.
    """
    some(answers, "answers")
    pairs = [(answer, alone[answer.request]) for answer in answers]
    digests = [
        (one, other)
        for answer, reference in pairs
        for one, other in zip(answer.digests, reference.digests, strict=False)
    ]
    known = some([pair for pair in digests if all(pair)], "digests of logits")
    tokens = sum(len(reference.text) for _, reference in pairs)
    some(range(tokens), "tokens of answers")
    return AnswerShares(
        answers=len(answers),
        tokens=tokens,
        equal=sum(
            one == other
            for answer, reference in pairs
            for one, other in zip(answer.text, reference.text, strict=False)
        ),
        lost=sum(max(0, len(reference.text) - len(answer.text)) for answer, reference in pairs),
        doubled=sum(max(0, len(answer.text) - len(reference.text)) for answer, reference in pairs),
        digests=len(known),
        equal_digests=sum(one == other for one, other in known),
        unknown=tokens - len(known),
        failed=tuple(answer.error for answer in answers if answer.error),
    )


def open_at(answers: Sequence[LoadAnswer], at: float) -> list[LoadAnswer]:
    """Answers that had begun to come at a moment, and went on after it."""
    return [
        answer for answer in answers if answer.arrivals and answer.arrivals[0] <= at < answer.arrivals[-1]
    ]


def gap_s(answer: LoadAnswer, at: float, until: float) -> float:
    """The longest time that its client waited for the next piece, of waits that overlap with a stretch."""
    waits = [end - begin for begin, end in answer.waits if end > at and begin < until]
    return max(waits, default=0.0)
