"""Whatever is sent to an entity's subjects: a counted dead letter, an answer to who asked, and it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgpack
import nats
import pytest
from nats.aio.client import Client

from bus import subjects
from bus.connection import Bus
from bus.nats import reply_subjects
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.router.service import Router, RouterConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind
from schemas.errors import NoResponders
from schemas.gateway_api import DoorRequest
from schemas.registry import Resolve
from schemas.signals import AccessRequest
from tests.bad_messages import bad_messages
from tests.builders.routes import policy
from tests.integration.entities.conftest import Dial, Heard, Start
from tests.patience import PATIENCE_S
from tests.waiting import eventually

TOKENS = {"sid": "x", "gateway": "gateway-east", "cluster": "east", "job": "j", "action": "job-list"}


@dataclass
class Case:
    """One entity: its bus, its rows with their tokens, and how to see that it still answers."""

    bus: Bus
    rows: list[tuple[Subject, dict[str, str]]]
    works: Callable[[], Awaitable[bool]]


async def raw_client(server: EmbeddedServer) -> Client:
    return await nats.connect(server.url, max_reconnect_attempts=0)


async def asked(client: Client, row: Subject, subject: str, data: bytes) -> bytes:
    """What whoever serves `row` answers to these bytes."""
    answerer = row.answerer_on(subject)
    connection = reply_subjects.of_connection(reply_subjects.inbox_of(EntityKind.CLIENT, "intruder"))
    reply = f"{connection}.{answerer}.{reply_subjects.question(subject, data, answerer)}"
    answers = await client.subscribe(reply, max_msgs=1)
    await client.publish(subject, data, reply=reply)
    return (await answers.next_msg(timeout=PATIENCE_S)).data


async def check(case: Case, server: EmbeddedServer, letters: Heard) -> None:
    client = await raw_client(server)
    try:
        sent = 0
        for row, tokens in case.rows:
            subject = row(**(TOKENS | tokens))
            for what, data in bad_messages(row).items():
                if row.reply is None:
                    await client.publish(subject, data)
                else:
                    answer = msgpack.unpackb(await asked(client, row, subject, data))
                    assert (answer["type"], answer["body"]["code"]) == ("error", "bad_message"), (
                        row.name,
                        what,
                    )
                    assert "\n" not in answer["body"]["text"]
                    assert "Traceback" not in answer["body"]["text"]
                sent += 1
        await client.flush()
        await eventually(lambda: case.bus.counters.dead_letters >= sent)
        assert case.bus.counters.dead_letters == sent
        assert case.bus.counters.handler_errors == 0
        name = case.bus.sender.name
        await eventually(lambda: sum(m.service == name for m in letters.messages) == sent)
        assert all(len(letter.head) <= 1024 for letter in letters.messages)
        assert await case.works()
    finally:
        await client.close()


@pytest.fixture
async def letters(dial: Dial) -> Heard:
    return await Heard.on(await dial("tap", EntityKind.TAP), subjects.DEAD_LETTER)


async def test_registry(
    registry: ServiceRegistry, dial: Dial, own_server: EmbeddedServer, letters: Heard
) -> None:
    client = await dial("client")

    async def works() -> bool:
        return bool((await client.request(subjects.RESOLVE, Resolve())).records)

    rows: list[tuple[Subject, dict[str, str]]] = [
        (subjects.REGISTRATION, {}),
        (subjects.HEARTBEAT, {}),
        (subjects.STATE_CHANGE, {}),
        (subjects.RESOLVE, {}),
        (subjects.RELEASE_JOB, {}),
        (subjects.TERMINATION, {}),
    ]
    await check(Case(registry._bus, rows, works), own_server, letters)


async def test_router(
    registry: ServiceRegistry, dial: Dial, start: Start, own_server: EmbeddedServer, letters: Heard
) -> None:
    bus = await dial("router-east", EntityKind.ROUTER)
    await start(Router(bus, RouterConfig(cluster="east")))
    client = await dial("client")

    async def works() -> bool:
        answer = await client.command(subjects.QOS_POLICY, policy(), deadline_s=PATIENCE_S, sid="router-east")
        return bool(answer.note == "adopted")

    rows = [
        (subjects.QOS_POLICY, {"sid": "router-east"}),
        (subjects.LINK_FAULT, {}),
        (subjects.ADVERTISEMENT, {}),
    ]
    await check(Case(bus, rows, works), own_server, letters)


async def test_authorizer(
    registry: ServiceRegistry, dial: Dial, authorizer: Authorizer, own_server: EmbeddedServer, letters: Heard
) -> None:
    client = await dial("gateway-east", EntityKind.GATEWAY)

    async def works() -> bool:
        request = AccessRequest(token="olga", action="mesh.read", resource="mesh", gateway="gateway-east")
        return bool((await client.request(subjects.ACCESS, request, gateway="gateway-east")).allow)

    await check(Case(authorizer._bus, [(subjects.ACCESS, {})], works), own_server, letters)


async def test_gateway(
    dial: Dial, start: Start, authorizer: Authorizer, own_server: EmbeddedServer, letters: Heard
) -> None:
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    await start(Gateway(bus, GatewayConfig(cluster="east")))
    client = await dial("client")

    async def works() -> bool:
        request = DoorRequest(token="olga", action="mesh.read")
        with pytest.raises(NoResponders, match=r"mesh\.query"):  # its answer: nobody orchestrates here
            await client.request(subjects.DOOR, request, action="mesh-read")
        return True

    rows = [
        (subjects.QOS_POLICY, {"sid": "gateway-east"}),
        (subjects.STEP_BEGIN, {}),
        (subjects.DOOR, {}),
        (subjects.COMPUTE, {}),
        (subjects.ADVERTISEMENT, {}),
    ]
    await asyncio.wait_for(check(Case(bus, rows, works), own_server, letters), PATIENCE_S)
