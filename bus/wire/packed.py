"""Messages that stay in their wire form: packed once, and assembled into larger ones without unpacking.

A pydantic record of a few hundred bytes takes some kilobytes in memory, and packing it takes longer than
all the rest of sending it. A service that keeps thousands of records and sends each of them again and again
keeps them packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack

from schemas.base import Message
from schemas.errors import BadMessage

MessageT = TypeVar("MessageT", bound=Message)

_packer = msgpack.Packer()


@dataclass(frozen=True, slots=True)
class Packed(Generic[MessageT]):
    """A message of type `cls` with its body as msgpack. We packed it ourselves, so it fits the schema."""

    cls: type[MessageT]
    body: bytes

    def open(self) -> MessageT:
        """The unpacked message."""
        raw = msgpack.unpackb(self.body, strict_map_key=False)
        message: MessageT = self.cls.__pydantic_validator__.validate_python(raw)
        return message


def pack(message: MessageT) -> Packed[MessageT]:
    """A message's wire form.

    Raises:
        BadMessage: a value has no msgpack form (an integer beyond 64 bits).
    """
    return Packed(type(message), pack_value(message.__pydantic_serializer__.to_python(message), message))


def pack_value(value: Any, of: Message | type[Message]) -> bytes:
    """Any value of a message of type `of` as msgpack.

    Raises:
        BadMessage: it has no msgpack form.
    """
    try:
        packed: bytes = _packer.pack(value)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"{of.wire_type}: cannot be encoded: {error}", reason="unencodable") from error


def assemble(
    cls: type[MessageT], fields: Mapping[str, Any], spliced: Mapping[str, Sequence[Packed[Any]]]
) -> Packed[MessageT]:
    """Packs a message from plain `fields` and from sequences of already packed messages.

    The caller is responsible for names and types, as with `model_construct`.
    """
    parts = [_packer.pack_map_header(len(fields) + len(spliced))]
    for name, value in fields.items():
        parts += (pack_value(name, cls), pack_value(value, cls))
    for name, members in spliced.items():
        parts += (pack_value(name, cls), _packer.pack_array_header(len(members)))
        parts += [member.body for member in members]
    return Packed(cls, b"".join(parts))


Sendable = Message | Packed[Any]
"""A message that can be published, answered or written."""
