"""An answer's text as its tokens come: whole characters, stops, log-probabilities. Pure.

A piece depends on the tokens up to it alone. So every gateway makes the same pieces of the same tokens, and
the number of tokens up to a piece is its place in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from entities.tokens.byte_tokens import Tokenizer
from schemas.services.generation import GeneratedToken


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token as text, and how likely it and its rivals were. `offset`: where its text begins."""

    text: str
    token: int
    offset: int
    logprob: float | None
    likeliest: tuple[tuple[str, float], ...]
    digest: str


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What `number` tokens together add to the piece before. `ends`: it is the last one."""

    number: int
    text: str
    told: tuple[ToldToken, ...] = ()
    ends: Literal["", "stop", "length"] = ""


class AnswerText:
    """Turns one answer's tokens into pieces. `stop`: texts that end it; they are not part of it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = tokenizer.text()
        self._held = ""  # may be the beginning of a stop
        self._told: list[ToldToken] = []
        self._length = 0  # characters so far, held ones too
        self.number = 0
        self.ended = False

    def add(self, token: GeneratedToken) -> AnswerPiece | None:
        """The piece that this token completes; None: nothing is certain yet, or the answer has ended."""
        if self.ended:
            return None
        self.number += 1
        if token.ends == "stop":  # a stop token, whose text is no part of the answer
            return self._piece(self._held + self._decoder.end(), "stop")
        self._told.append(self._tell(token))
        added = self._decoder.add(token.token)
        if token.ends == "length":
            added += self._decoder.end()
        self._length += len(added)
        text = self._held + added
        if (place := self._stop_in(text)) is not None:
            return self._piece(text[:place], "stop")
        if token.ends:
            return self._piece(text, "length")
        certain = len(text) - self._uncertain(text)
        self._held = text[certain:]
        return self._piece(text[:certain], "") if certain else None

    def _piece(self, text: str, ends: Literal["", "stop", "length"]) -> AnswerPiece:
        told, self._told = tuple(self._told), []
        self.ended = bool(ends)
        return AnswerPiece(self.number, text, told, ends)

    def _tell(self, token: GeneratedToken) -> ToldToken:
        likeliest = tuple((self._tokenizer.decode((each,)), value) for each, value in token.likeliest)
        text = self._tokenizer.decode((token.token,))
        return ToldToken(text, token.token, self._length, token.logprob, likeliest, token.digest)

    def _stop_in(self, text: str) -> int | None:
        """Where the answer ends: the stop that is whole first counts, however tokens cut the text."""
        found = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _uncertain(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def text_of(tokens: Sequence[GeneratedToken], tokenizer: Tokenizer, stop: Sequence[str]) -> str:
    """The text of a whole answer, without the stop that ended it."""
    text = tokenizer.decode([each.token for each in tokens if each.ends != "stop"])
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return text[: min(places, default=len(text))]
