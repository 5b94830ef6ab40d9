"""Conversations as tokens of which the answers count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from workers.data.source_files import SourceFile
from workers.data.text.documents import BadDocument, Row, file_format, half_surrogate, read_rows
from workers.data.text.template import ChatTemplate, UnfitConversation
from workers.data.text.tokenizer import Ids, TextTokenizer, naming_failures

FIELD = "messages"


class ChatTokens(NamedTuple):
    """A conversation's ids, (tokens,), and whether each is a target, (tokens,) bool."""

    ids: Ids
    counted: npt.NDArray[np.bool_]


class ChatReader:
    """Reads conversations and makes tokens of them.

    Args:
        template: Renders them.
        loss_on: Which tokens are targets.
    """

    def __init__(self, template: ChatTemplate, loss_on: Literal["answers", "everything"]) -> None:
        self._template = template
        self._answers_only = loss_on == "answers"
        self.digest = hashlib.sha256(f"{template.digest} {loss_on}".encode()).hexdigest()

    def conversations(
        self, files: Iterable[SourceFile], tokenizer: TextTokenizer, fields: SourceSpec
    ) -> Iterator[ChatTokens | BadDocument]:
        """All conversations of a source, in order.

        Raises:
            BadData: A file holds no conversations.
        """
        for file in files:
            kind = file_format(file, fields)
            if kind == "text":
                raise BadData(f"{file.name}: kind chat reads JSON lines and Parquet files; say data.format")
            for row in read_rows(file, kind, fields.field or FIELD):
                yield self._tokens(row, tokenizer) if isinstance(row, Row) else row

    def _tokens(self, row: Row, tokenizer: TextTokenizer) -> ChatTokens | BadDocument:
        if reason := misformed(row.value):
            return BadDocument(row.place, reason)
        others: Mapping[str, Any] = {
            key: row.others[key] for key in ("tools", "documents") if key in row.others
        }
        try:
            text, answers = self._template.render(row.value, others, answers=self._answers_only)
            if broken := half_surrogate(text):
                return BadDocument(row.place, broken)
            with naming_failures(tokenizer, row.place):
                piece = tokenizer.encode_with_ranges(text)
        except UnfitConversation as error:
            return BadDocument(row.place, str(error))
        counted = np.full(len(piece.ids), not self._answers_only)
        if self._answers_only:
            for start, end in answers:
                counted |= (piece.starts >= start) & (piece.starts < end)
            if not counted.any():
                return BadDocument(row.place, "no token of it belongs to an answer")
        if not len(piece.ids):
            return BadDocument(row.place, "the template renders nothing of it")
        return ChatTokens(piece.ids, counted)


def misformed(messages: Any) -> str:
    """Why this is no conversation; empty if it is one."""
    if not isinstance(messages, list) or not messages:
        return f"{FIELD} is no list of messages" if not isinstance(messages, list) else "it has no message"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is no object"
        if not isinstance(message.get("role"), str):
            keys = ", ".join(map(str, list(message)[:6])) or "nothing"
            return f"message {number} has no role, but {keys}; a message is {{role, content}}"
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            return f"message {number} ({message['role']}) has no content"
    return ""
