"""The tokenizer of models that read bytes: one token per byte of UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenText(Protocol):
    """The text of an answer while its tokens come."""

    def add(self, token: int) -> str:
        """The text that is certain with this token; bytes of an unfinished character are held back."""
        ...

    def end(self) -> str:
        """What was held back, with U+FFFD for bytes that are no character."""
        ...


class Tokenizer(Protocol):
    """What a gateway needs of a tokenizer. All of it may be called from any thread."""

    vocabulary: int
    stop_tokens: tuple[int, ...]

    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def text(self) -> TokenText: ...
    def chat(self, messages: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        """The prompt of a conversation of (role, text).

        Raises:
            BadInput: its template fails.
        """
        ...


class ByteText:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes((token & 0xFF,)))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Utf8Tokenizer:
    """Tokens 0 to 255. A conversation is lines `role: text`, and the answer begins after `assistant:`."""

    vocabulary = 256
    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token & 0xFF for token in tokens).decode("utf-8", "replace")

    def text(self) -> ByteText:
        return ByteText()

    def chat(self, messages: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        lines = [f"{role}: {text}\n" for role, text in messages]
        return self.encode("".join([*lines, "assistant:"]))
