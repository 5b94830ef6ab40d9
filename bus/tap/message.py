"""One message as a tap sees it: decoded by the table of subjects, without its secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
from pydantic import ValidationError

from bus import subjects
from bus.subject_row import Subject
from bus.tap.filter import tree_of
from bus.wire import codec
from bus.wire.redaction import may_hold_secrets, redacted
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message before it is decoded. `operation` is that of a key-value marker: DEL, PURGE or MaxAge."""

    at: float
    subject: str
    data: bytes
    operation: str = ""


@dataclass(frozen=True, slots=True)
class TappedMessage:
    """One decoded message.

    `problem` says why `message` is None; `note` says what a key-value marker means. `raw`, `envelope` and
    `message` hold `***` in place of a secret.
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
    """The subject of the request, if this is a reply."""
    latency_ms: float | None = None
    """Milliseconds since the request was seen here, if this is a reply."""
    size: int = 0
    """Size on the bus, in bytes."""
    operation: str = ""

    def tree(self) -> dict[str, Any]:
        """All fields as plain values, for filters and JSON."""
        return tree_of(self.subject, self.row, self.tokens, self.envelope, self.message)


def decode(subject: str, data: bytes, *, at: float, operation: str = "") -> TappedMessage:
    """Decodes one message by the table. Never raises: a message that can't be read has a `problem`."""
    match = subjects.lookup(subject)
    row, tokens = match if match is not None else (None, {})
    size = len(data)
    if not data and (operation or (row is not None and row.bucket is not None)):
        notes = {"DEL": "deleted", "PURGE": "deleted", "MaxAge": "expired"}
        note = notes.get(operation, operation or "deleted")
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
    """The envelope of a message whose body is unusable; None if the envelope is unusable, too."""
    try:
        return Envelope.model_validate(msgpack.unpackb(data, strict_map_key=False), extra="ignore")
    except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
        return None
