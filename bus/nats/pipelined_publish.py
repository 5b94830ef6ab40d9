"""Publishes many messages in one write, in the NATS protocol's own form (`PUB` and `HPUB`).

nats-py checks, counts and flushes each message by itself, in three coroutines. A sender of a thousand
messages at once would spend most of its time there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bus.nats.client import NatsConnection
from schemas.errors import BadMessage

PIECE_BYTES = 256 << 10
"""Bytes per write: enough to be worth it, and few enough that back-pressure on the connection is noticed."""


class Outgoing(NamedTuple):
    """A message to send. Its subjects and headers are our own, without blanks and line breaks."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None


def command(message: Outgoing) -> bytes:
    """The message as a protocol command."""
    subject, payload, reply, headers = message
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"NATS/1.0\r\n{lines}\r\n".encode()
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        *(subject.encode(), reply.encode(), len(head), len(head) + len(payload)),
        *(head, payload),
    )


async def send_many(connection: NatsConnection, messages: Sequence[Outgoing]) -> None:
    """Publishes messages in this order, as repeated calls of `NatsConnection.send` would.

    Raises:
        BadMessage: one message is larger than the server accepts; none was sent.
        BusUnreachable: disconnected and the buffer is full; some may have been sent.
    """
    most = connection.client.max_payload
    if any(len(message.payload) > most for message in messages):
        raise BadMessage(f"one of {len(messages)} messages is larger than {most:,} bytes", reason="oversized")
    for piece, count in _pieces(messages):
        await connection.write(piece, count)


def _pieces(messages: Iterable[Outgoing]) -> Iterable[tuple[bytes, int]]:
    piece: list[bytes] = []
    size = 0
    for message in messages:
        piece.append(command(message))
        size += len(piece[-1])
        if size >= PIECE_BYTES:
            yield b"".join(piece), len(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece), len(piece)
