"""nats-py's private attributes: those we use exist in the release that we have, and one file uses them."""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import version
from pathlib import Path

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

import bus
from bus.nats import nats_internals

RELEASE = "2.16"
"""For which the attributes were checked. With another one: read what changed in them, then change this."""


def test_the_release_is_the_one_that_was_checked() -> None:
    assert version("nats-py").startswith(f"{RELEASE}.")


def test_one_file_of_the_bus_uses_them() -> None:
    own = Path(nats_internals.__file__)
    names = set(re.findall(r"\b(?:client|subscription|message)\._(\w+)", own.read_text(encoding="utf-8")))
    assert names >= {"server_info", "server_pool", "pending_queue", "sid"}
    use = re.compile(rf"(?<!\bself)\._({'|'.join(names)})\b")
    files = [path for path in Path(bus.__file__).parent.rglob("*.py") if path != own]
    assert [path.name for path in files if use.search(path.read_text(encoding="utf-8"))] == []


async def test_a_client_has_what_is_read_and_written() -> None:
    client = Client()
    assert nats_internals.server_info(client) == {}
    assert nats_internals.server_pool(client) == []
    client._setup_server_pool(["nats://a:4222"])
    assert isinstance(client._server_pool[0], Srv)
    assert nats_internals.server_pool(client) == [("nats://a:4222", None)]
    assert nats_internals.reconnection_task(client) is None
    await nats_internals.write_commands(client, b"PUB a  0\r\n\r\n")
    assert client._pending == [b"PUB a  0\r\n\r\n"]
    assert client.pending_data_size == len(b"PUB a  0\r\n\r\n")
    nats_internals.drop_pending(client)
    assert client.pending_data_size == 0
    assert client._pending == []


async def test_a_subscription_takes_another_queue_and_counts_its_bytes() -> None:
    client, messages = Client(), asyncio.Queue[Msg]()
    subscription = Subscription(client, id=7, subject="a")
    early = Msg(_client=client, subject="a", data=b"early", _sid=7)
    subscription._pending_queue.put_nowait(early)
    subscription._pending_size = 5
    nats_internals.share_queue(subscription, messages)
    assert subscription._pending_queue is messages
    assert messages.get_nowait() is early
    nats_internals.handled(subscription, Msg(_client=client, subject="a", data=b"of another", _sid=8))
    assert subscription.pending_bytes == 5
    nats_internals.handled(subscription, early)
    assert subscription.pending_bytes == 0


async def test_deliveries_are_stopped_by_the_subscriptions_number() -> None:
    client, written = Client(), list[bytes]()

    async def send(command: bytes, priority: bool = False) -> None:
        written.append(command)

    client._send_command = send
    client._flush_queue = asyncio.Queue()
    await nats_internals.stop_deliveries(client, Subscription(client, id=7, subject="a"))
    assert written == [b"UNSUB 7 \r\n"]
