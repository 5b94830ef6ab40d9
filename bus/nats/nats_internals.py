"""What the bus needs of nats-py beyond its public interface: all of it, and nothing else, is here.

nats-py may change these attributes in any release. So a test (`tests/unit/bus/nats/test_nats_internals.py`)
names the release for which they were checked, and fails with another one until somebody has looked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription


def server_info(client: Client) -> Mapping[str, Any]:
    """What the connected server said about itself: `server_id`, `nonce`, `cluster` and so on."""
    return client._server_info


def server_pool(client: Client) -> list[tuple[str, str | None]]:
    """The URLs of the servers that the client knows, each with the name that its certificate must have."""
    return [(server.uri.geturl(), server.tls_name) for server in client._server_pool]


async def write_commands(client: Client, commands: bytes) -> None:
    """Writes commands of the protocol behind what is pending, and wakes the writing task."""
    await client._send_command(commands)
    if client._flush_queue is not None and client._flush_queue.empty():
        await client._flush_pending()


def drop_pending(client: Client) -> None:
    """Drops what was not sent. Without a connection `close` would try to send it, raise, and leave tasks."""
    client._pending.clear()
    client._pending_data_size = 0


def reconnection_task(client: Client) -> asyncio.Task[None] | None:
    """The task that dials again; it may swallow a cancellation."""
    return client._reconnection_task


def share_queue(subscription: Subscription, messages: asyncio.Queue[Msg]) -> None:
    """Has the client put the subscription's messages into this queue, those included that came already.

    nats-py offers its own queue only through an iterator that makes a task for each message.
    """
    early, subscription._pending_queue = subscription._pending_queue, messages
    while not early.empty() and not messages.full():
        messages.put_nowait(early.get_nowait())


def handled(subscription: Subscription, message: Msg) -> None:
    """Notes that a message of the shared queue was taken; nats-py also bounds the bytes that wait."""
    if subscription._id == message._sid:
        subscription._pending_size -= len(message.data)


async def stop_deliveries(client: Client, subscription: Subscription) -> None:
    """Tells the server to send no more; messages that it has already sent are still received."""
    await client._send_unsubscribe(subscription._id)
