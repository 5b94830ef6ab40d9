"""Envelopes on the wire: msgpack maps, validated on arrival, tolerant of newer minor versions.

Encoding is on the hot path of every publish, so it builds the envelope's map directly instead of
validating what we have just built ourselves. Decoding trusts nothing.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import msgpack
from pydantic import ValidationError

from bus.subject import Subject
from bus.wire.correlation import handling
from bus.wire.packed import Packed, Sendable, pack_value
from schemas.base import MESSAGE_TYPES, Message
from schemas.envelope import Envelope, Sender
from schemas.errors import BadMessage

MAX_MESSAGE_BYTES = 8 << 20
"""Largest message that is sent or read: the server's `max_payload` (tensors never travel on the bus)."""
MOST_NOTICE_BYTES = 1 << 20
"""Of these, of what is published or asked: it is refused before anything of it is read. Of answers, the row
says how many (`Subject.answer_bytes`); what streams and buckets keep may be larger."""
MOST_ENTRIES = 1 << 16
"""Of one list or map in a large message."""
MOST_KEYS = 1 << 14
"""Of a map in a large message of a known row, where that has maps whose keys are data."""
BYTES_PER_ITEM = 3
"""A large message has one item (a value with its key, a quarter of a list or map) per so many bytes at most,
and one per twice as many beyond a notice's size. Records take ten on average; what is denser was made to fill
memory: an empty list of one byte takes seventy."""
MOST_PROBLEMS = 64
"""Beyond which a message that does not fit is not explained: that alone would take as long as reading it."""
LARGE_BYTES = 64 << 10
"""From here on a message is read without the garbage collector."""
KNOWN_SENDERS = 4_096
"""Senders whose identity is not checked again at each of their messages."""

T = TypeVar("T")

_senders: dict[tuple[str, str, str], Sender] = {}
_check_envelope = Envelope.__pydantic_validator__.validate_python


class SenderMap:
    """A sender as it stands in envelopes, with the beginning of each type's envelope packed once.

    Type, version and sender are the same in all messages of a type from one sender: packing them again
    would take as long as all the rest.
    """

    __slots__ = ("_heads", "fields")

    def __init__(self, sender: Sender) -> None:
        self.fields = {"name": sender.name, "kind": str(sender.kind), "incarnation": sender.incarnation}
        self._heads: dict[type[Message], tuple[bytes, bytes]] = {}

    def heads(self, cls: type[Message]) -> tuple[bytes, bytes]:
        """A msgpack map of seven entries, and one of eight, of which the first three are there."""
        found = self._heads.get(cls)
        if found is None:
            fixed = {"type": cls.wire_type, "version": cls.wire_version, "sender": self.fields}
            packed = msgpack.packb(fixed)[1:]
            found = self._heads[cls] = (_MAP_OF_SEVEN + packed, _MAP_OF_EIGHT + packed)
        return found


_MAP_OF_SEVEN, _MAP_OF_EIGHT = b"\x87", b"\x88"
_BODY: bytes = msgpack.packb("body")


def sender_map(sender: Sender) -> SenderMap:
    """What `encode` writes as the sender; made once per connection."""
    return SenderMap(sender)


def encode(message: Sendable, sender: SenderMap, envelope_id: str, causation: str | None = None) -> bytes:
    """The wire form of `message` under a new envelope.

    Its cause is `causation`, else the message that this task handles; it carries that one's correlation.

    Raises:
        BadMessage: a value has no msgpack form (an integer beyond 64 bits), or it is too large.
    """
    origin = handling.get()
    rest: dict[str, Any]
    if origin is None:
        rest = {"id": envelope_id, "causation": causation, "sent_at": time.time()}
        eighth = False
    else:
        rest = {"id": envelope_id, "causation": causation or origin.id, "sent_at": time.time()}
        if eighth := origin.correlation is not None:
            rest["correlation"] = origin.correlation
    cls: type[Message]
    data: bytes
    # The first byte of what is packed here says how many entries the map has; the head has said it already.
    if isinstance(message, Packed):
        cls = message.cls
        data = sender.heads(cls)[eighth] + pack_value(rest, cls)[1:] + _BODY + message.body
    else:
        cls = type(message)
        rest["body"] = cls.__pydantic_serializer__.to_python(message)
        data = sender.heads(cls)[eighth] + pack_value(rest, cls)[1:]
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
    return _decode(data, expected) if len(data) < LARGE_BYTES else _undisturbed(_decode, data, expected)


def _decode(data: bytes, expected: type[Message] | None) -> tuple[Message, Envelope]:
    raw = _unpack(data, expected)
    sender: Any = raw.get("sender")
    try:
        # A sender that is known is not checked again: that is a third of what an envelope costs.
        raw["sender"] = _senders[sender["name"], sender["kind"], sender["incarnation"]]
    except (KeyError, TypeError):
        sender = None  # to be remembered, if it is one
    try:
        envelope: Envelope = _check_envelope(raw, extra="ignore")
    except ValidationError as error:
        raise BadMessage(f"envelope: {explain(error)}", reason="envelope") from error
    if sender is None:
        _remember(envelope.sender)
    version = envelope.version
    cls = _class_of(envelope.type, version)
    if expected is not None and cls is not expected:
        raise BadMessage(f"{cls.wire_type} where {expected.wire_type} belongs", reason="wrong type")
    return _body(cls, version, envelope.body), envelope


def decode_answer(data: bytes) -> Message:
    """The message alone: of an answer, everything else is known to whoever asked.

    Raises:
        BadMessage: as `decode`.
    """
    return _decode_answer(data) if len(data) < LARGE_BYTES else _undisturbed(_decode_answer, data)


def _decode_answer(data: bytes) -> Message:
    raw = _unpack(data)
    try:
        wire_type, (major, minor), body = raw["type"], raw["version"], raw["body"]
        return _body(_class_of(wire_type, (major, minor)), (major, minor), body)
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage("envelope: type, version or body is missing or wrong", reason="envelope") from error


def peek(data: bytes) -> dict[str, Any]:
    """The envelope as a plain map, nothing checked; empty where it is none."""
    try:
        return _unpack(data)
    except BadMessage:
        return {}


def _unpack(data: bytes, expected: type[Message] | None = None) -> dict[str, Any]:
    if len(data) > MAX_MESSAGE_BYTES:
        raise too_large("message", len(data))
    try:
        if len(data) < LARGE_BYTES:
            raw = msgpack.unpackb(data, strict_map_key=False)
        else:
            raw = _read_large(data, expected)
    except BadMessage:
        raise
    except Exception as error:  # msgpack raises many kinds, all of them mean the same here
        raise BadMessage(f"not msgpack: {type(error).__name__}", reason="malformed") from error
    if not isinstance(raw, dict):
        raise BadMessage(f"envelope: a {type(raw).__name__}, not a map", reason="envelope")
    return raw


def _read_large(data: bytes, expected: type[Message] | None) -> object:
    per_item = BYTES_PER_ITEM if len(data) <= MOST_NOTICE_BYTES else 2 * BYTES_PER_ITEM
    items = _Items(len(data) // per_item)
    return msgpack.unpackb(
        data,
        strict_map_key=False,
        max_array_len=MOST_ENTRIES,
        max_map_len=MOST_ENTRIES if expected is None else _most_keys(expected),
        list_hook=items.count,
        object_hook=items.count,
    )


@functools.cache
def _most_keys(cls: type[Message]) -> int:
    """Of any map in a message of this type: as many as its models have fields, and room for what newer
    versions add, unless it has maps whose keys are data."""
    fields = [len(Envelope.model_fields)]

    def is_closed(schema: Any) -> bool:
        if isinstance(schema, dict):
            if schema.get("type") == "model-fields":
                fields.append(len(schema["fields"]))
            closed = schema.get("type") not in ("dict", "any")
            return closed and all(is_closed(part) for part in schema.values())
        return all(is_closed(part) for part in schema) if isinstance(schema, list) else True

    closed = is_closed(cls.__pydantic_core_schema__)
    return 4 * max(fields) + 64 if closed else MOST_KEYS


class _Items:
    """How many more there may be in a message: whatever is counted has been made, so the rest is not."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most

    def count(self, container: Collection[Any]) -> Collection[Any]:
        self.left -= 4 + len(container)
        if self.left < 0:
            raise BadMessage(
                "more lists, maps and values than a message of its size may have", reason="dense"
            )
        return container


def refuse_oversized(row: Subject, data: bytes) -> None:
    """What is heard on a row, before it is read.

    Raises:
        BadMessage: it is larger than what is published or asked may be.
    """
    if len(data) > MOST_NOTICE_BYTES:
        raise BadMessage(
            f"{row.name}: {len(data):,} bytes, where {MOST_NOTICE_BYTES:,} are the most; "
            "what is larger belongs into the object store",
            reason="oversized",
        )


def refuse_oversized_answer(row: Subject, data: bytes) -> None:
    """What comes as an answer, before it is read; what is to go out as one, before it is sent.

    Raises:
        BadMessage: it is larger than an answer of this row may be.
    """
    if len(data) > row.answer_bytes:
        raise BadMessage(
            f"{row.name}: an answer of {len(data):,} bytes, where {row.answer_bytes:,} are the most",
            reason="oversized answer",
        )


def _undisturbed(read: Callable[..., T], *arguments: Any) -> T:
    """Reads without the garbage collector: a large message is thousands of objects that stay, none of them in
    a cycle, and looking through them again and again takes longer than reading."""
    if not gc.isenabled():
        return read(*arguments)
    gc.disable()
    try:
        return read(*arguments)
    finally:
        gc.enable()


def _remember(sender: Sender) -> None:
    if len(_senders) >= KNOWN_SENDERS:
        _senders.clear()
    _senders[sender.name, sender.kind, sender.incarnation] = sender


def _class_of(wire_type: str, version: tuple[int, int]) -> type[Message]:
    cls = MESSAGE_TYPES.get(wire_type)
    if cls is None:
        raise BadMessage(f"unknown type {wire_type[:80]!r}", reason="unknown type")
    if version[0] != cls.wire_version[0]:
        raise BadMessage(
            f"{wire_type} {version[0]}.{version[1]}: this service reads {cls.wire_version[0]}.x; "
            "update the older side",
            reason="wrong version",
        )
    return cls


def _body(cls: type[Message], version: tuple[int, int], body: object) -> Message:
    extra: Literal["ignore"] | None = "ignore" if version[1] > cls.wire_version[1] else None
    try:
        message: Message = cls.__pydantic_validator__.validate_python(body, extra=extra)
    except ValidationError as error:
        raise BadMessage(f"{cls.wire_type}: {explain(error)}", reason="invalid body") from error
    return message


def too_large(what: str, size: int) -> BadMessage:
    return BadMessage(
        f"{what} of {size:,} bytes is more than the bus takes ({MAX_MESSAGE_BYTES:,}); use the object store",
        reason="oversized",
    )


def explain(error: ValidationError) -> str:
    """The first complaint in one line: where and what, without the offending value."""
    if error.error_count() > MOST_PROBLEMS:
        return f"{error.error_count()} problems"
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "value"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {first['msg']}{more}"
