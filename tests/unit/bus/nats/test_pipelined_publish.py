"""What `bus.nats.pipelined_publish` writes is what nats-py would."""

from __future__ import annotations

import pytest
from nats.aio.client import Client

from bus.nats.pipelined_publish import Outgoing, command


@pytest.mark.parametrize(
    "message",
    [
        Outgoing("a.b", b""),
        Outgoing("a.b", b"payload\r\nPUB x 1\r\n", "_INBOX.x.7"),
        Outgoing("a.b", b"payload", "", {"Nats-Expected-Last-Subject-Sequence": "0"}),
        Outgoing("a.b", b"\x00\xff", "_INBOX.x.7", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}),
    ],
)
async def test_a_message_is_written_as_the_client_writes_it(message: Outgoing) -> None:
    client, written = Client(), list[bytes]()

    async def send(command: bytes, priority: bool = False) -> None:
        written.append(bytes(command))

    client._send_command = send
    size = len(message.payload)
    headers = None if message.headers is None else dict(message.headers)
    await client._send_publish(message.subject, message.reply, message.payload, size, headers)
    assert command(message) == written[0]
