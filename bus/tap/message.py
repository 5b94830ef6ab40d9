"""One message as a tap sees it: decoded by the table, secrets out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
from pydantic import ValidationError

from bus import subjects
from bus.subject import Subject
from bus.tap.filter import tree_of
from bus.wire import codec
from bus.wire.redaction import may_hold_secrets, redacted
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message before anyone has looked at it. `operation`: what a key-value mark says of itself."""

    at: float
    subject: str
    data: bytes
    operation: str = ""


@dataclass(frozen=True, slots=True)
class TappedMessage:
    """One message as seen. `problem` says why `message` is None; `note` what a bare key-value mark means.

    `raw`, `envelope` and `message` hold `***` where a secret was.
    """

    at: float
    subject: str
    row: Subject | None
    tokens: dict[str, str]
    envelope: Envelope | None
    message: Message | None
    raw: bytes = field(repr=False)
    problem: str = ""
    note: str = ""
    answers: str = ""
    """For a reply: the subject of the request."""
    latency_ms: float | None = None
    """For a reply: since the request was seen here."""
    size: int = 0
    """Bytes on the bus."""
    operation: str = ""

    def tree(self) -> dict[str, Any]:
        """All fields as plain values, for filters and JSON."""
        return tree_of(self.subject, self.row, self.tokens, self.envelope, self.message)


def decode(subject: str, data: bytes, *, at: float, operation: str = "") -> TappedMessage:
    """One message by the table. Never raises: what can't be read has `problem`."""
    found = subjects.lookup(subject)
    row, tokens = found if found is not None else (None, {})
    size = len(data)
    if not data and (operation or (row is not None and row.bucket is not None)):
        marks = {"DEL": "deleted", "PURGE": "deleted", "MaxAge": "expired"}
        note = marks.get(operation, operation or "deleted")
        return TappedMessage(at, subject, row, tokens, None, None, data, note=note, operation=operation)
    try:
        message, envelope = codec.decode(data, None if row is None else row.schema)
        if may_hold_secrets(type(message)):
            clean = redacted(data, row)
            if clean is not data:
                data = clean
                message, envelope = codec.decode(data, None if row is None else row.schema)
    except BadMessage as error:
        data = redacted(data, row)
        return TappedMessage(
            at, subject, row, tokens, _envelope(data), None, data, problem=error.text, size=size
        )
    return TappedMessage(at, subject, row, tokens, envelope, message, data, size=size)


def _envelope(data: bytes) -> Envelope | None:
    """The envelope of a message whose body is unusable, if at least that can be read."""
    try:
        return Envelope.model_validate(msgpack.unpackb(data, strict_map_key=False), extra="ignore")
    except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
        return None
