"""The tokenizers of model services for gateways, by the libraries that training reads texts with.

`entities` imports no libraries of texts, and `workers` nothing of gateways: they meet here. Libraries are
imported when the first service with such a tokenizer is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from entities.tokens.byte_tokens import Tokenizer, Utf8Tokenizer
from schemas.errors import BadInput

if TYPE_CHECKING:
    from workers.serving.conversations import Conversations
    from workers.serving.tokens import GrowingText, ServedTokenizer


class LibraryText:
    """The text of one answer; see `TokenText`."""

    def __init__(self, growing: GrowingText) -> None:
        self._growing = growing

    def add(self, token: int) -> str:
        return self._growing.push(token)

    def end(self) -> str:
        return self._growing.finish()


class LibraryTokenizer:
    """A tokenizer of any library; see `Tokenizer`."""

    def __init__(self, served: ServedTokenizer, template: str) -> None:
        self._served = served
        self._template = template
        self._conversations: Conversations | None = None
        self.vocabulary = served.tokenizer.vocabulary
        self.stop_tokens: tuple[int, ...] = () if served.end_id is None else (served.end_id,)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._served.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._served.decode(tokens)

    def text(self) -> LibraryText:
        from workers.serving.tokens import GrowingText

        return LibraryText(GrowingText(self._served.tokenizer))

    def chat(self, messages: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        if self._conversations is None:
            from workers.serving.conversations import Conversations

            self._conversations = Conversations(self._served.tokenizer, self._template)
        prompt = self._conversations.prompt([{"role": role, "content": text} for role, text in messages])
        return tuple(self._served.encode(prompt, special_tokens=False))


def open_service_tokenizer(name: str, template: str) -> Tokenizer:
    """The tokenizer of bytes, or the one in the folder `name`.

    Raises:
        BadInput: it is none, or its library is not installed here.
    """
    if name == "bytes" and not template:
        return Utf8Tokenizer()
    try:
        from workers.serving.tokens import ServedTokenizer

        return LibraryTokenizer(ServedTokenizer(name), template)
    except ImportError as error:
        raise BadInput(f"its library is not installed at this gateway: {error}") from None
