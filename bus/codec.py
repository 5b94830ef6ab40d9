"""Envelopes on the wire: msgpack maps, validated on arrival, tolerant of newer minor versions.

Encoding is on the hot path of every publish, so it builds the envelope's map directly instead of
validating what we have just built ourselves. Decoding trusts nothing.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack
from pydantic import ValidationError

from schemas.base import MESSAGE_TYPES, Message
from schemas.envelope import Envelope, Sender
from schemas.errors import BadMessage

MAX_MESSAGE_BYTES = 8 << 20
"""Largest message that is sent or read: the server's `max_payload` (tensors never travel on the bus)."""


def sender_map(sender: Sender) -> dict[str, str]:
    """What `encode` writes as the sender; made once per connection."""
    return {"name": sender.name, "kind": str(sender.kind), "incarnation": sender.incarnation}


def encode(message: Message, sender: dict[str, str], envelope_id: str, causation: str | None = None) -> bytes:
    """The wire form of `message` under a new envelope.

    Raises:
        BadMessage: a value has no msgpack form (an integer beyond 64 bits), or it is too large.
    """
    cls = type(message)
    try:
        data: bytes = msgpack.packb(
            {
                "type": cls.wire_type,
                "version": cls.wire_version,
                "id": envelope_id,
                "causation": causation,
                "sender": sender,
                "sent_at": time.time(),
                "body": cls.__pydantic_serializer__.to_python(message),
            }
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"{cls.wire_type}: cannot be encoded: {error}", reason="unencodable") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise too_large(cls.wire_type, len(data))
    return data


def decode(data: bytes, expected: type[Message] | None = None) -> tuple[Message, Envelope]:
    """The message and its envelope.

    A body of a newer minor version than ours is read with unknown fields ignored, at every depth; one
    of our own version or older must fit exactly (fields that it lacks take their defaults).

    Args:
        data: What arrived.
        expected: The row's schema, where the subject binds one.

    Raises:
        BadMessage: with field `reason`: oversized, malformed, envelope, unknown type, wrong type,
            wrong version, or invalid body.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise too_large("message", len(data))
    try:
        raw = msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # msgpack raises many kinds, all of them mean the same here
        raise BadMessage(f"not msgpack: {type(error).__name__}", reason="malformed") from error
    try:
        envelope = Envelope.model_validate(raw, extra="ignore")
    except ValidationError as error:
        raise BadMessage(f"envelope: {explain(error)}", reason="envelope") from error
    cls = MESSAGE_TYPES.get(envelope.type)
    if cls is None:
        raise BadMessage(f"unknown type {envelope.type[:80]!r}", reason="unknown type")
    if expected is not None and cls is not expected:
        raise BadMessage(f"{cls.wire_type} where {expected.wire_type} belongs", reason="wrong type")
    (major, minor), (our_major, our_minor) = envelope.version, cls.wire_version
    if major != our_major:
        raise BadMessage(
            f"{cls.wire_type} {major}.{minor}: this service reads {our_major}.x; update the older side",
            reason="wrong version",
        )
    try:
        if minor > our_minor:
            return cls.model_validate(envelope.body, extra="ignore"), envelope
        return cls.model_validate(envelope.body), envelope
    except ValidationError as error:
        raise BadMessage(f"{cls.wire_type}: {explain(error)}", reason="invalid body") from error


def too_large(what: str, size: int) -> BadMessage:
    return BadMessage(
        f"{what} of {size:,} bytes is more than the bus takes ({MAX_MESSAGE_BYTES:,}); use the object store",
        reason="oversized",
    )


def explain(error: ValidationError) -> str:
    """The first complaint in one line: where and what, without the offending value."""
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "value"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {first['msg']}{more}"
