"""Values in buckets that can't be read: their bytes are kept before other values replace them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.marks import SECRET


class UnreadableValue(Message, wire="mesh.unreadable_value"):
    """A part of an unreadable value, on the stream `UNREADABLE`. Large values have several parts in order."""

    service: Token
    bucket: Token
    key: str
    revision: int
    reason: str
    at: Time
    size: int = Field(description="of the whole value, in bytes")
    part: int = Field(0, ge=0)
    parts: int = Field(1, ge=1)
    data: Annotated[bytes, Field(repr=False), SECRET]


class UnreadableNote(Part):
    """A note of an unreadable value; its bytes are in the stream `UNREADABLE`, from `sequence` on."""

    bucket: Token
    key: str
    revision: int
    reason: str
    service: Token
    at: Time
    size: int
    sequence: int = 0
