"""Removes secrets from encoded messages, for code that shows or keeps messages of others.

The schemas mark secret fields (`schemas.marks`). A message is redacted by the type that it names and by the
row of its subject, so that a message on the wrong subject does not reveal secrets either.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgpack

from bus import subjects
from bus.subject_row import Subject
from bus.wire import codec
from schemas.base import MESSAGE_TYPES, Message
from schemas.redaction import HIDDEN, masks_of, redact
from schemas.telemetry import DeadLetter

VEIL = HIDDEN.encode()
"""Replaces a whole message that can't be read and may hold secrets."""


def may_hold_secrets(cls: type[Message]) -> bool:
    return bool(masks_of(cls)) or cls is DeadLetter


def redacted(data: bytes, row: Subject | None = None) -> bytes:
    """`data` with `***` in place of each secret; the very same object if there is none.

    Bytes that can't be read are hidden as a whole if the row's messages may hold secrets, or if they name a
    type that carries a token.
    """
    raw = codec.peek(data)
    if not raw:
        return VEIL if data and _may_hide_secrets(data, row) else data
    name = raw.get("type")
    named_type = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    body = raw.get("body")
    for cls in dict.fromkeys((named_type, *_classes(row))):
        if cls is DeadLetter:
            body = _redact_dead_letter(body)
        elif cls is not None:
            body = redact(cls, body)
    if body == raw.get("body"):
        return data
    packed: bytes = msgpack.packb({**raw, "body": body})
    return packed


def _redact_dead_letter(body: Any) -> Any:
    """The body of a dead letter with the head of the unusable message redacted."""
    if not isinstance(body, Mapping) or not isinstance(body.get("head"), bytes):
        return body
    match = subjects.lookup(str(body.get("subject")))
    return {**body, "head": redacted(body["head"], None if match is None else match[0])}


def _classes(row: Subject | None) -> tuple[type[Message] | None, ...]:
    return () if row is None else (row.schema, row.reply)


def _may_hide_secrets(data: bytes, row: Subject | None) -> bool:
    if any(cls is not None and masks_of(cls) for cls in _classes(row)):
        return True
    return any(name in data for name in _types_with_token())


@cache
def _types_with_token() -> tuple[bytes, ...]:
    """The wire names of the messages that carry a bearer token."""
    return tuple(
        name.encode() for name, cls in MESSAGE_TYPES.items() if "token" in masks_of(cls) and "." in name
    )
