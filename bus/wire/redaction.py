"""Messages as bytes without their secrets: for whatever shows or keeps what others said.

What is secret is marked in the schemas (`schemas.marks`). A message is judged by the type that it names and
by the row of its subject, so that one that was sent to the wrong subject gives nothing away either.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgpack

from bus import subjects
from bus.subject import Subject
from bus.wire import codec
from schemas.base import MESSAGE_TYPES, Message
from schemas.redaction import HIDDEN, masks_of, redact
from schemas.telemetry import DeadLetter

VEIL = HIDDEN.encode()
"""Stands for a whole message that can't be read where secrets are sent."""


def may_hold_secrets(cls: type[Message]) -> bool:
    return bool(masks_of(cls)) or cls is DeadLetter


def redacted(data: bytes, row: Subject | None = None) -> bytes:
    """`data` with each secret as `***`; the very same bytes where there is none.

    Bytes that can't be read are hidden whole if the row's messages may hold secrets, or if they name a type
    that carries a token.
    """
    raw = codec.peek(data)
    if not raw:
        return VEIL if data and _suspect(data, row) else data
    name = raw.get("type")
    named = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    body = raw.get("body")
    for cls in dict.fromkeys((named, *_classes(row))):
        if cls is DeadLetter:
            body = _letter(body)
        elif cls is not None:
            body = redact(cls, body)
    if body == raw.get("body"):
        return data
    packed: bytes = msgpack.packb({**raw, "body": body})
    return packed


def _letter(body: Any) -> Any:
    """A dead letter keeps the head of a message that could not be used."""
    if not isinstance(body, Mapping) or not isinstance(body.get("head"), bytes):
        return body
    found = subjects.lookup(str(body.get("subject")))
    return {**body, "head": redacted(body["head"], None if found is None else found[0])}


def _classes(row: Subject | None) -> tuple[type[Message] | None, ...]:
    return () if row is None else (row.schema, row.reply)


def _suspect(data: bytes, row: Subject | None) -> bool:
    if any(cls is not None and masks_of(cls) for cls in _classes(row)):
        return True
    return any(name in data for name in _bearing())


@cache
def _bearing() -> tuple[bytes, ...]:
    """Wire names of the messages that carry a bearer token themselves."""
    return tuple(
        name.encode() for name, cls in MESSAGE_TYPES.items() if "token" in masks_of(cls) and "." in name
    )
