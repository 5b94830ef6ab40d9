"""Answers in OpenAI's shapes, whole and in pieces. Pure, but for `whole_answer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from entities.gateway.generation.answer_stream import merged
from entities.gateway.generation.answer_text import AnswerPiece, ToldToken
from entities.gateway.generation.operations import Answering
from schemas.base import Part
from schemas.errors import Fenced, Unavailable
from schemas.services.completion import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatToken,
    Completion,
    DeltaChoice,
    LikelyToken,
    MessageDelta,
    ServedBy,
    TextChoice,
    TextLogprobs,
    TokenUsage,
)

NO_LOGPROB = -9999.0
"""OpenAI's value for a token that is not among the likeliest; its clients want a number."""


@dataclass(slots=True)
class WholeAnswer:
    """One answer so far: its text, and what was told of its tokens."""

    text: list[str] = field(default_factory=list)
    told: list[ToldToken] = field(default_factory=list)
    tokens: int = 0
    ends: str = ""

    def add(self, piece: AnswerPiece) -> None:
        self.text.append(piece.text)
        self.told += piece.told
        self.tokens = piece.number
        self.ends = piece.ends


class AnswerShape:
    """Makes one request's answers. All of them tell the same name, time and version."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        first, version = answering.first, answering.version
        self.is_chat = first.shape == "chat"
        self.with_usage = first.usage
        self._told = first.sampling.logprobs is not None
        self._digests = first.sampling.digests
        self._rivals = first.sampling.logprobs or 0
        self._common: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{first.id}",
            "created": int(first.began),
            "model": first.model,
            "system_fingerprint": f"{version.version}-{version.fingerprint or 'none'}",
        }

    def served(self, told: Sequence[ToldToken] = ()) -> ServedBy:
        answering = self._answering
        version = answering.version
        return ServedBy(
            service=answering.service.service,
            version=version.version,
            exact=bool(version.exact),
            inexact_because=version.inexact_because,
            generation=answering.first.id if len(answering.sessions) == 1 else "",
            digests=tuple(token.digest for token in told) if self._digests else None,
            aggregation=answering.aggregation,
        )

    def usage(self, tokens: int) -> TokenUsage:
        """`tokens`: of all answers together. A prompt counts once, however many answers it has."""
        prompts = {session.generation.prompt for session in self._answering.sessions}
        prompt = sum(map(len, prompts))
        return TokenUsage(prompt_tokens=prompt, completion_tokens=tokens, total_tokens=prompt + tokens)

    # --- pieces -------------------------------------------------------------------------------------------
    def role(self, index: int) -> Part | None:
        """What a chat's stream begins with."""
        if not self.is_chat:
            return None
        delta = MessageDelta(role="assistant", content="")
        return ChatChunk(**self._common, choices=(DeltaChoice(index=index, delta=delta),), dmsc=self.served())

    def piece(self, index: int, piece: AnswerPiece) -> Part:
        ends: Any = piece.ends or None
        served = self.served(piece.told)
        if not self.is_chat:
            logprobs = text_logprobs(piece.told, self._rivals) if self._told else None
            choice = TextChoice(index=index, text=piece.text, logprobs=logprobs, finish_reason=ends)
            return Completion(**self._common, choices=(choice,), dmsc=served)
        told = chat_logprobs(piece.told, self._rivals) if self._told else None
        delta = MessageDelta(content=piece.text)
        return ChatChunk(
            **self._common,
            choices=(DeltaChoice(index=index, delta=delta, logprobs=told, finish_reason=ends),),
            dmsc=served,
        )

    def last(self, tokens: int) -> Part:
        """What a stream with `include_usage` ends with."""
        kind = ChatChunk if self.is_chat else Completion
        return kind(**self._common, choices=(), usage=self.usage(tokens), dmsc=self.served())

    # --- whole answers ------------------------------------------------------------------------------------
    def whole(self, answers: Sequence[WholeAnswer]) -> Completion | ChatCompletion:
        usage = self.usage(sum(each.tokens for each in answers))
        told = [token for each in answers for token in each.told]
        common: dict[str, Any] = {**self._common, "usage": usage, "dmsc": self.served(told)}
        if self.is_chat:
            return ChatCompletion(
                **common, choices=tuple(map(self._chat_choice, range(len(answers)), answers))
            )
        return Completion(**common, choices=tuple(map(self._text_choice, range(len(answers)), answers)))

    def _text_choice(self, index: int, answer: WholeAnswer) -> TextChoice:
        logprobs = text_logprobs(answer.told, self._rivals) if self._told else None
        ends: Any = answer.ends
        return TextChoice(index=index, text="".join(answer.text), logprobs=logprobs, finish_reason=ends)

    def _chat_choice(self, index: int, answer: WholeAnswer) -> ChatChoice:
        logprobs = chat_logprobs(answer.told, self._rivals) if self._told else None
        message = AnswerMessage(content="".join(answer.text))
        ends: Any = answer.ends
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=ends)


async def whole_answer(answering: Answering) -> Completion | ChatCompletion:
    """The whole answer, once it is there. Ends its sessions in any case.

    Raises what ends one of them early.
    """
    answers = [WholeAnswer() for _ in answering.sessions]
    try:
        async for index, piece in merged(answering):
            answers[index].add(piece)
    except Fenced as error:
        raise Unavailable(f"{error.text}; ask again", retry_after_s=1.0) from None
    finally:
        answering.cancel()
    return AnswerShape(answering).whole(answers)


def text_logprobs(told: Sequence[ToldToken], rivals: int) -> TextLogprobs:
    """`/v1/completions`' lists. Of rivals with the same text (parts of characters) the likeliest is told."""
    likeliest: list[dict[str, float]] = []
    for token in told:
        by_text: dict[str, float] = {}
        for text, value in token.likeliest[:rivals]:
            by_text[text] = max(value, by_text.get(text, value))
        likeliest.append(by_text)
    return TextLogprobs(
        tokens=tuple(token.text for token in told),
        token_logprobs=tuple(token.logprob for token in told),
        top_logprobs=tuple(likeliest) if rivals else None,
        text_offset=tuple(token.offset for token in told),
    )


def chat_logprobs(told: Sequence[ToldToken], rivals: int) -> ChatLogprobs:
    return ChatLogprobs(
        content=tuple(
            ChatToken(
                token=token.text,
                logprob=NO_LOGPROB if token.logprob is None else token.logprob,
                bytes=_bytes_of(token.text),
                top_logprobs=tuple(
                    LikelyToken(token=text, logprob=value, bytes=_bytes_of(text))
                    for text, value in token.likeliest[:rivals]
                ),
            )
            for token in told
        )
    )


def _bytes_of(text: str) -> tuple[int, ...] | None:
    """The text's bytes; None: it is a part of a character, which has none of its own."""
    return None if "�" in text else tuple(text.encode())
