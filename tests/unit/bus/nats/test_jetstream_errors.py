"""What the server says of streams that can't be made yet, and that it is waited for."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from bus.messaging.streams import provision, stream_configs
from bus.nats.client import NatsConnection
from bus.nats.dialer import ConnectionTimes
from schemas.errors import DeadlineExceeded

NO_PEERS = {"code": 400, "err_code": 10005, "description": "no suitable peers for placement"}


class Server:
    """A connection to a cluster in which the first `refusals` streams find too few servers."""

    broker = None
    closing = False

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.made: list[str] = []
        self.times = ConnectionTimes(retry_s=0.0)

    async def ask(self, subject: str, payload: bytes, **_: object) -> Msg:
        answer: dict[str, object] = {}
        if self.refusals:
            self.refusals -= 1
            answer = {"error": NO_PEERS}
        else:
            self.made.append(subject.rpartition(".")[2])
        return Msg(cast(Client, None), subject, data=json.dumps(answer).encode())

    async def wait_online(self) -> None:
        await asyncio.sleep(0)


async def test_a_cluster_whose_servers_have_not_found_one_another_is_waited_for() -> None:
    server = Server(refusals=3)
    await provision(cast(NatsConnection, server))
    assert server.refusals == 0, "it was refused each time"
    assert server.made == [config["name"] for config in stream_configs(1)], "each once, the refused one too"


async def test_a_cluster_that_stays_too_small_is_named() -> None:
    server = Server(refusals=1 << 30)
    with pytest.raises(DeadlineExceeded, match="no suitable peers for placement: too few servers of the"):
        await provision(cast(NatsConnection, server), replicas=3, deadline_s=0.0)
    assert server.made == []
