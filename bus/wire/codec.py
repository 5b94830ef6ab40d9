"""Encodes and decodes envelopes: msgpack maps, validated on arrival, tolerant of newer minor versions.

Encoding is on the hot path of every publish, so it builds the envelope's map directly and does not validate
its own work. Decoding trusts nothing.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import msgpack
from pydantic import ValidationError

from bus.subject_row import Subject
from bus.wire.correlation import handling
from bus.wire.packed import Packed, Sendable, pack_value
from schemas.base import MESSAGE_TYPES, Message
from schemas.envelope import Envelope, Sender
from schemas.errors import BadMessage

MAX_MESSAGE_BYTES = 8 << 20
"""Most bytes of a message, the server's `max_payload`. Tensors never travel on the bus."""
MOST_NOTICE_BYTES = 1 << 20
"""Most bytes of a published message or a request; a larger one is refused before any of it is read. For
answers, the row has its own bound (`Subject.answer_bytes`); messages in streams and buckets may be larger."""
MOST_ENTRIES = 1 << 16
"""Most entries of one list or map in a large message."""
MOST_KEYS = 1 << 14
"""Most entries of a map in a large message of a known row, if its schema has maps whose keys are data."""
BYTES_PER_ITEM = 3
"""A large message may have one item per this many bytes, or per twice as many beyond a notice's size. An item
is a value with its key; a list or map counts as four. Records take ten bytes per item on average. A denser
message was made to fill memory: an empty list of one byte takes seventy."""
MOST_PROBLEMS = 64
"""Most validation errors that are explained: explaining more would take as long as reading the message."""
LARGE_BYTES = 64 << 10
"""From this size on, a message is read without the garbage collector."""
KNOWN_SENDERS = 4_096
"""Most senders that are cached, so that their identity is not validated again at each message."""

T = TypeVar("T")

_senders: dict[tuple[str, str, str], Sender] = {}
_check_envelope = Envelope.__pydantic_validator__.validate_python


class SenderMap:
    """A sender in the form that envelopes have, with the beginning of each type's envelope packed once.

    Type, version and sender are the same in all messages of a type from one sender. Packing them again would
    take as long as all the rest.
    """

    __slots__ = ("_heads", "fields")

    def __init__(self, sender: Sender) -> None:
        self.fields = {"name": sender.name, "kind": str(sender.kind), "incarnation": sender.incarnation}
        self._heads: dict[type[Message], tuple[bytes, bytes]] = {}

    def heads(self, cls: type[Message]) -> tuple[bytes, bytes]:
        """The beginnings of a msgpack map of seven entries and of one of eight: their first three entries."""
        head_pair = self._heads.get(cls)
        if head_pair is None:
            fixed = {"type": cls.wire_type, "version": cls.wire_version, "sender": self.fields}
            packed = msgpack.packb(fixed)[1:]
            head_pair = self._heads[cls] = (_MAP_OF_SEVEN + packed, _MAP_OF_EIGHT + packed)
        return head_pair


_MAP_OF_SEVEN, _MAP_OF_EIGHT = b"\x87", b"\x88"
_BODY: bytes = msgpack.packb("body")


def sender_map(sender: Sender) -> SenderMap:
    """The sender in the form that `encode` takes; made once per connection."""
    return SenderMap(sender)


def encode(message: Sendable, sender: SenderMap, envelope_id: str, causation: str | None = None) -> bytes:
    """The wire form of `message` under a new envelope.

    Its cause is `causation`, or else the message that this task handles. Its correlation is that of the
    message that this task handles.

    Raises:
        BadMessage: a value has no msgpack form (an integer beyond 64 bits), or the message is too large.
    """
    origin = handling.get()
    fields: dict[str, Any]
    if origin is None:
        fields = {"id": envelope_id, "causation": causation, "sent_at": time.time()}
        has_correlation = False
    else:
        fields = {"id": envelope_id, "causation": causation or origin.id, "sent_at": time.time()}
        if has_correlation := origin.correlation is not None:
            fields["correlation"] = origin.correlation
    cls: type[Message]
    data: bytes
    # The first byte of a packed map is its number of entries; the head has it already, so it is cut off here.
    if isinstance(message, Packed):
        cls = message.cls
        data = sender.heads(cls)[has_correlation] + pack_value(fields, cls)[1:] + _BODY + message.body
    else:
        cls = type(message)
        fields["body"] = cls.__pydantic_serializer__.to_python(message)
        data = sender.heads(cls)[has_correlation] + pack_value(fields, cls)[1:]
    if len(data) > MAX_MESSAGE_BYTES:
        raise too_large(cls.wire_type, len(data))
    return data


def decode(data: bytes, expected: type[Message] | None = None) -> tuple[Message, Envelope]:
    """The message and its envelope.

    In a body of a newer minor version than ours, unknown fields are ignored at every depth. A body of our own
    version or an older one must have no unknown fields; missing fields take their defaults.

    Args:
        data: The message's bytes.
        expected: The row's schema, if the subject is in the table.

    Raises:
        BadMessage: with a field `reason`: oversized, malformed, dense, envelope, unknown type, wrong type,
            wrong version, or invalid body.
    """
    return _decode(data, expected) if len(data) < LARGE_BYTES else _without_gc(_decode, data, expected)


def _decode(data: bytes, expected: type[Message] | None) -> tuple[Message, Envelope]:
    raw = _unpack(data, expected)
    sender: Any = raw.get("sender")
    try:
        # A cached sender is not validated again; validation is a third of an envelope's cost.
        raw["sender"] = _senders[sender["name"], sender["kind"], sender["incarnation"]]
    except (KeyError, TypeError):
        sender = None  # not in the cache yet
    try:
        envelope: Envelope = _check_envelope(raw, extra="ignore")
    except ValidationError as error:
        raise BadMessage(f"envelope: {explain(error)}", reason="envelope") from error
    if sender is None:
        _cache_sender(envelope.sender)
    version = envelope.version
    cls = _class_of(envelope.type, version)
    if expected is not None and cls is not expected:
        raise BadMessage(f"{cls.wire_type} where {expected.wire_type} belongs", reason="wrong type")
    return _body(cls, version, envelope.body), envelope


def decode_answer(data: bytes) -> Message:
    """The message of an answer, without its envelope, which the asker does not need.

    Raises:
        BadMessage: as for `decode`.
    """
    return _decode_answer(data) if len(data) < LARGE_BYTES else _without_gc(_decode_answer, data)


def _decode_answer(data: bytes) -> Message:
    raw = _unpack(data)
    try:
        wire_type, (major, minor), body = raw["type"], raw["version"], raw["body"]
        return _body(_class_of(wire_type, (major, minor)), (major, minor), body)
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage("envelope: type, version or body is missing or wrong", reason="envelope") from error


def peek(data: bytes) -> dict[str, Any]:
    """The envelope as a plain map without validation; empty if it can't be read."""
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
    except Exception as error:  # msgpack raises many kinds, which all mean the same here
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
    """The most entries of any map in a message of this type.

    It is derived from the number of fields of the type's models, with room for what newer versions add. If
    the type has maps whose keys are data, it is `MOST_KEYS`.
    """
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
    """Counts the items of a message while it is unpacked, and stops that when there are too many."""

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
    """Refuses an oversized published message or request before it is read.

    Raises:
        BadMessage: it has more than `MOST_NOTICE_BYTES`.
    """
    if len(data) > MOST_NOTICE_BYTES:
        raise BadMessage(
            f"{row.name}: {len(data):,} bytes, where {MOST_NOTICE_BYTES:,} are the most; "
            "what is larger belongs into the object store",
            reason="oversized",
        )


def refuse_oversized_answer(row: Subject, data: bytes) -> None:
    """Refuses an oversized answer before it is read or sent.

    Raises:
        BadMessage: it is larger than an answer of this row may be.
    """
    if len(data) > row.answer_bytes:
        raise BadMessage(
            f"{row.name}: an answer of {len(data):,} bytes, where {row.answer_bytes:,} are the most",
            reason="oversized answer",
        )


def _without_gc(read: Callable[..., T], *arguments: Any) -> T:
    """Calls `read` without the garbage collector.

    A large message becomes thousands of objects, none of them in a cycle. Scanning them again and again would
    take longer than reading the message.
    """
    if not gc.isenabled():
        return read(*arguments)
    gc.disable()
    try:
        return read(*arguments)
    finally:
        gc.enable()


def _cache_sender(sender: Sender) -> None:
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
    """The first validation error in one line: the place and the problem, without the offending value."""
    if error.error_count() > MOST_PROBLEMS:
        return f"{error.error_count()} problems"
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "value"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {first['msg']}{more}"
