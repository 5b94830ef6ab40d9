"""Messages as a tap sees them, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from bus.subject_row import Subject
from bus.tap.message import RawMessage, TappedMessage, decode
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import EntityKind, Sender

SENDER = codec.sender_map(Sender(name="someone", kind=EntityKind.CLIENT, incarnation="i1"))


def arrived(
    row: Subject, message: Message, name: str, cause: str | None = None, *, at: float = 1.0, **tokens: Any
) -> RawMessage:
    return RawMessage(at, row(**tokens), codec.encode(message, SENDER, name, cause))


def answer(message: Message, name: str, cause: str, *, at: float = 1.0) -> RawMessage:
    return RawMessage(at, "_INBOX.someone.x.1", codec.encode(message, SENDER, name, cause))


def look(one: RawMessage) -> TappedMessage:
    return decode(one.subject, one.data, at=one.at, operation=one.operation)
