"""Text to tokens, and back while an answer grows. No torch: gateways tokenize in a process of its own."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from schemas.errors import BadData, BadInput, DmscError
from workers.data.text.tokenizer import TextTokenizer, first_line, open_tokenizer

_REPLACEMENT = "\ufffd"
_MOST_HELD = 4
"""Tokens of one character: UTF-8 has up to four bytes. What is held longer is no character."""


class ServedTokenizer:
    """A service's tokenizer, as the door needs it.

    Args:
        name: `bytes`, or the path of a tokenizer's folder or file.

    Raises:
        BadInput: There is none, it is none, or its library is not installed.
    """

    def __init__(self, name: str) -> None:
        try:
            self.tokenizer = open_tokenizer(name)
        except BadData as error:
            raise BadInput(error.text.replace("data.tokenizer", "tokenizer")) from None
        self.special_ids = self.tokenizer.special_ids()

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the ids: versions with the same one can be mixed token by token."""
        return self.tokenizer.digest

    @property
    def end_id(self) -> int | None:
        """The token with which an answer ends; None: there is none, as of bytes."""
        eos = self.tokenizer.tokens.eos
        return self.tokenizer.id_of(eos) if eos else None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a prompt.

        Args:
            text: The prompt; a chat template's text has its special tokens written out.
            special_tokens: Whether the tokenizer adds its own, and is not to recognise any in the text.

        Raises:
            BadInput: The library fails at it.
        """
        try:
            if special_tokens:
                return [int(id) for id in self.tokenizer.encode([text], special_tokens=True)[0]]
            return [int(id) for id in self.tokenizer.encode_with_ranges(text).ids]
        except (DmscError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the libraries raise bare Exceptions, and panics
            raise BadInput(f"the prompt can't be tokenized: {first_line(error)}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(ids)


class GrowingText:
    """The text of an answer, token by token: what is pushed together is the text of all ids.

    A character may be spread over several tokens; it is held back until it is whole. How a token reads may
    depend on those before it, so a few are always read together.

    Args:
        tokenizer: The service's tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.name == "bytes" else None
        self._ids: list[int] = []
        self._read = 0
        """Ids whose text was given."""
        self._given = ""
        """Text of the ids that are read together, as far as it was given."""

    def push(self, id: int) -> str:
        """The text that this token adds; empty while a character is not whole."""
        if self._bytes is not None:
            return self._bytes.decode(bytes([id])) if id < 256 else ""
        self._ids.append(id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MOST_HELD:
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What was still held back, when the answer is at its end."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._give(self._tokenizer.decode(self._ids))

    def _give(self, text: str) -> str:
        added = text[len(self._given) :]
        self._given = text
        fresh = len(self._ids) - self._read
        self._read = len(self._ids)
        if len(self._ids) > 2 * _MOST_HELD and not text.endswith(_REPLACEMENT):
            # the newest tokens alone are what the next ones are read with
            self._ids = self._ids[-max(fresh, _MOST_HELD) :]
            self._read = len(self._ids)
            self._given = self._tokenizer.decode(self._ids)
        return added
