"""The load of a service under chaos: what is asked, and an answer beside the undisturbed one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

PROMPTS = (
    "def parse(",
    "import ",
    "class Reader:",
    "    return ",
    "Once upon a time",
    "# a line of",
    "for each in ",
    "The first of them",
)
FEWEST_TOKENS = 2


class AnswerVerdict(StrEnum):
    """What an answer is beside the undisturbed one to the same request."""

    EQUAL = "equal"
    SHORT = "lost"  # it ends too early
    LONG = "doubled"  # something of it came twice
    OTHER = "different"
    FAILED = "failed"  # the client was told an error


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """One request; the same one has the same answer. `digests`: those of its tokens' logits are compared."""

    number: int
    prompt: str
    tokens: int
    temperature: float
    seed: int
    digests: bool


@dataclass(frozen=True, kw_only=True)
class LoadAnswer:
    """An answer as one client got it. Times are seconds since the epoch; `arrivals`: of its pieces.

    `finish` is empty if its last piece did not come. `error`: code and text, if the client was told one.
    """

    request: int
    began: float
    ended: float
    arrivals: tuple[float, ...] = ()
    text: str = ""
    finish: str = ""
    digests: tuple[str, ...] = ()
    error: str = ""

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        """The times in which its client waited for the next piece: from the request, or the piece before."""
        return tuple(zip((self.began, *self.arrivals), self.arrivals, strict=False))


def requests_of(count: int, tokens: int, context: int, seed: int) -> tuple[LoadRequest, ...]:
    """`count` requests for `tokens` tokens, or as many as fit; half of them greedy, half drawn by `seed`.

    `context`: the model's, in tokens; 0: unknown. A prompt has at most as many tokens as bytes.
    """
    found = []
    for number in range(count):
        prompt = PROMPTS[number % len(PROMPTS)]
        if context:
            prompt = prompt[: max(1, context // 4)]
        room = context - len(prompt) - 1 if context else tokens
        found.append(
            LoadRequest(
                number=number,
                prompt=prompt,
                tokens=max(FEWEST_TOKENS, min(tokens, room)),
                temperature=float(number % 2),
                seed=seed + number,
                digests=number % 4 < 2,
            )
        )
    return tuple(found)


def judge(answer: LoadAnswer, reference: LoadAnswer) -> AnswerVerdict:
    """What `answer` is beside the undisturbed `reference`.

    There is a digest for each token, so that more or fewer of them are tokens that came twice or were lost,
    even where the text does not show it. An empty one is not known, of a server that died, and not compared.
    """
    if answer.error:
        return AnswerVerdict.FAILED
    if not answer.finish or (answer.text != reference.text and reference.text.startswith(answer.text)):
        return AnswerVerdict.SHORT
    if answer.text != reference.text:
        return AnswerVerdict.LONG if len(answer.text) > len(reference.text) else AnswerVerdict.OTHER
    if len(answer.digests) < len(reference.digests):
        return AnswerVerdict.SHORT
    if len(answer.digests) > len(reference.digests):
        return AnswerVerdict.LONG
    pairs = zip(answer.digests, reference.digests, strict=True)
    if any(own and other and own != other for own, other in pairs):
        return AnswerVerdict.OTHER
    return AnswerVerdict.EQUAL if answer.finish == reference.finish else AnswerVerdict.OTHER


def pieces_per_s(answers: Sequence[LoadAnswer]) -> float:
    """Pieces of answers per second, from the first request to the last piece; 0 without any."""
    arrivals = [at for answer in answers for at in answer.arrivals]
    if not arrivals:
        return 0.0
    seconds = max(arrivals) - min(answer.began for answer in answers)
    return len(arrivals) / seconds if seconds > 0 else 0.0
