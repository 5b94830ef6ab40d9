"""A request's prompt as tokens: the version's tokenizer, read once, and used outside of the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from entities.tokens.byte_tokens import Tokenizer, Utf8Tokenizer
from schemas.errors import BadInput, Unavailable
from schemas.job import JobRecord
from schemas.serve_spec import ServeSpec
from schemas.services.completion import ChatBody, CompletionBody
from schemas.services.model_service import ServedVersion

P = ParamSpec("P")
T = TypeVar("T")

MOST_CHARACTERS = 1 << 20
"""Most characters of one request's texts together, as many as a body at the path itself has bytes: a
tokenizer makes an object of each few of them. Tokens that are given count as characters."""
INLINE_CHARACTERS = 2_000
"""Texts up to this length are encoded at once: a thread costs more than they do."""

TokenizerOf = Callable[[JobRecord, ServeSpec], Awaitable[Tokenizer]]
"""Reads the tokenizer that a version names. Raises `BadInput` in one line if it can't be had."""


class Prompts:
    """Tokenizers by the job of a version, the least recently used ones dropped."""

    def __init__(
        self,
        job: Callable[[str], JobRecord | None],
        tokenizer_of: TokenizerOf,
        most: int = 64,
    ) -> None:
        self._job = job
        self._tokenizer_of = tokenizer_of
        self._most = most
        self._reading: OrderedDict[str, asyncio.Task[Tokenizer]] = OrderedDict()

    def serve_spec(self, version: ServedVersion) -> ServeSpec | None:
        """What the version's file says of serving; None: this gateway does not know its job yet."""
        record = self._job(version.job)
        return None if record is None else record.spec.serve

    async def tokenizer(self, version: ServedVersion) -> Tokenizer:
        """The version's tokenizer.

        Raises:
            Unavailable: this gateway does not know the version's job yet.
            BadInput: it can't be read, or does not fit the model's vocabulary.
        """
        task = self._reading.get(version.job)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            record = self._job(version.job)
            if record is None or record.spec.serve is None:
                raise Unavailable(f"the job {version.job} of {version.version} is not known here yet")
            work = self._tokenizer_of(record, record.spec.serve)
            task = self._reading[version.job] = asyncio.ensure_future(work)
            while len(self._reading) > self._most:
                self._reading.popitem(last=False)
        self._reading.move_to_end(version.job)
        tokenizer = await asyncio.shield(task)
        if 0 < version.vocabulary < tokenizer.vocabulary and not isinstance(tokenizer, Utf8Tokenizer):
            raise BadInput(
                f"{version.version}: its tokenizer has {tokenizer.vocabulary} tokens and the model "
                f"{version.vocabulary}; deploy it with the tokenizer that it was trained with"
            )
        return tokenizer


async def of_completion(
    body: CompletionBody, tokenizer: Tokenizer, vocabulary: int
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each prompt. Raises `BadInput` if one is empty, or has a token that the model has not."""
    return await tokens_of(body.prompts, tokenizer, vocabulary, "prompt")


async def tokens_of(
    texts: Iterable[str | tuple[int, ...]], tokenizer: Tokenizer, vocabulary: int, param: str
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each text, or the tokens that are given. `param`: what errors name.

    Raises `BadInput` as above, and if the texts are longer than `MOST_CHARACTERS` together.
    """
    texts = tuple(texts)
    _check_size(sum(map(len, texts)), param)
    found: list[tuple[int, ...]] = []
    for text in texts:
        if isinstance(text, str):
            tokens = await _beside_the_loop(len(text), tokenizer.encode, text)
        else:
            tokens = text
        found.append(_checked(tokens, vocabulary, param))
    return tuple(found)


async def of_chat(body: ChatBody, tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """The tokens of a conversation, by the version's template. Raises `BadInput` as `of_completion` does."""
    messages = [(message.role, message.text) for message in body.messages]
    _check_size(sum(len(text) for _, text in messages), "messages")
    if isinstance(tokenizer, Utf8Tokenizer):
        characters = sum(len(role) + len(text) for role, text in messages)
        tokens = await _beside_the_loop(characters, tokenizer.chat, messages)
    else:  # a template is a program, which may take its two seconds however short the conversation is
        tokens = await asyncio.to_thread(tokenizer.chat, messages)
    return _checked(tokens, vocabulary, "messages")


def _check_size(characters: int, param: str) -> None:
    if characters > MOST_CHARACTERS:
        raise BadInput(
            f"{param}: {characters:,} characters are above the limit of {MOST_CHARACTERS:,}; send less",
            reason="context_length_exceeded",
            param=param,
        )


def _checked(tokens: Sequence[int], vocabulary: int, param: str) -> tuple[int, ...]:
    if not tokens:
        raise BadInput(f"{param}: it has no tokens; give a text", param=param)
    if vocabulary and (worst := max(tokens)) >= vocabulary:
        raise BadInput(
            f"{param}: token {worst} is beyond the model's vocabulary of {vocabulary}", param=param
        )
    return tuple(tokens)


async def _beside_the_loop(characters: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    if characters <= INLINE_CHARACTERS:
        return work(*args, **named)
    return await asyncio.to_thread(work, *args, **named)
