"""Requests to a version that gave its slots back: held while it starts, and refused in time (ADR-0158)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from entities import metrics
from entities.gateway import Gateway
from entities.gateway.generation.held_requests import HoldConfig
from entities.gateway.http.config import HttpConfig
from schemas.envelope import EntityKind, Envelope
from schemas.services.model_service import ModelService, OrderService, VersionState
from tests.integration.entities.conftest import Dial, bearer
from tests.integration.entities.serving_stand_in import StandInInstance, answer_to, deploy
from tests.waiting import eventually

RUTH, ROB = bearer("ruth"), bearer("rob")
OPEN = 4


@pytest.fixture
def door() -> HttpConfig:
    """Few places for requests that are being answered."""
    return HttpConfig(open_requests=OPEN)


class Sleeper:
    """A service whose one version is idle, and an orchestrator that starts it when `start` is called."""

    def __init__(self, bus: Bus, dial: Dial, gateway: Gateway) -> None:
        self.bus, self.dial, self.gateway = bus, dial, gateway
        self.orders: list[OrderService] = []
        self.record: ModelService | None = None
        self.instance: StandInInstance | None = None

    async def order(self, message: OrderService, envelope: Envelope) -> ModelService:
        self.orders.append(message)
        assert self.record is not None
        return self.record

    async def say(self, state: VersionState, reason: str = "") -> None:
        """Writes the version's state, and waits until the gateway knows it."""
        self.record = await deploy(self.bus, stages=1, state=state, reason=reason)
        book, record = self.gateway.generations.book, self.record
        await eventually(lambda: book.get("letters") == record)
        await eventually(lambda: self.gateway.jobs.cache.get("serve1") is not None)

    async def start(self) -> None:
        sid = "serve1-s0-r0"
        self.instance = StandInInstance(await self.dial(sid, EntityKind.INSTANCE), sid, 1)
        await self.instance.start()


@pytest.fixture
async def sleeper(dial: Dial, gateway: Gateway) -> AsyncIterator[Sleeper]:
    bus = await dial("orchestrator-records", EntityKind.ORCHESTRATOR)
    sleeper = Sleeper(bus, dial, gateway)
    serving = await bus.serve(subjects.ORDER_SERVICE, sleeper.order)
    yield sleeper
    await serving.stop()
    if sleeper.instance is not None:
        await sleeper.instance.kill()


def set_hold(gateway: Gateway, **changes: float) -> None:
    held = gateway.generations.held
    held.config = replace(held.config, **changes)


async def complete(http: httpx.AsyncClient, headers: dict[str, str] = RUTH, **more: object) -> httpx.Response:
    body = {"model": "letters", "prompt": "abc", "max_tokens": 4, "temperature": 0} | more
    return await http.post("/v1/completions", json=body, headers=headers)


async def test_requests_wait_for_an_idle_version_and_start_it(
    sleeper: Sleeper, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await sleeper.say(VersionState.IDLE, "nobody has asked it for 300 s")
    asked = [asyncio.create_task(complete(http)) for _ in range(3)]
    await eventually(lambda: gateway.generations.held.waiting == 3 and sleeper.orders)
    assert [(order.action, order.version, order.user) for order in sleeper.orders] == [("wake", "v1", "ruth")]
    gone = asyncio.create_task(complete(http))
    await eventually(lambda: gateway.generations.held.waiting == 4)
    gone.cancel()
    await eventually(lambda: gateway.generations.held.waiting == 3, "a client that left waits on")
    await sleeper.start()
    await sleeper.say(VersionState.READY)
    for response in await asyncio.gather(*asked):
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == answer_to("abc", 4)
    assert gateway.generations.held.waiting == 0
    assert len(sleeper.orders) == 1, "one order for all of them"


async def test_one_user_has_a_part_of_the_places(
    sleeper: Sleeper, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    held = gateway.generations.held
    held.config = replace(held.config, most=3, most_each=2, again_s=7.0)
    await sleeper.say(VersionState.IDLE, "nobody has asked it for 300 s")
    asked = [asyncio.create_task(complete(http)) for _ in range(2)]
    await eventually(lambda: held.waiting == 2)
    beyond = await complete(http)
    assert (beyond.status_code, beyond.headers["retry-after"]) == (429, "7")
    assert "2 requests of yours wait here" in beyond.json()["error"]["message"]
    body = {"model": "letters", "prompt": "abc", "max_tokens": 4, "temperature": 0}
    asked.append(asyncio.create_task(http.post("/v1/completions", json=body, headers=bearer("rob"))))
    await eventually(lambda: held.waiting == 3, "another user has the place that is left")
    await sleeper.start()
    await sleeper.say(VersionState.READY)
    assert [each.status_code for each in await asyncio.gather(*asked)] == [200, 200, 200]
    assert (await complete(http)).status_code == 200
    await sleeper.say(VersionState.IDLE)
    assert sleeper.instance is not None
    again = [asyncio.create_task(complete(http)) for _ in range(2)]
    await eventually(lambda: held.waiting == 2, "places that were left are free again")
    await sleeper.say(VersionState.READY)
    assert [each.status_code for each in await asyncio.gather(*again)] == [200, 200]


async def test_what_does_not_start_in_time_is_said_with_a_time_to_come_again(
    sleeper: Sleeper, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    gateway.generations.held.config = HoldConfig(wait_s=0.2, most=1, again_s=7.0)
    await sleeper.say(VersionState.IDLE, "starts: parked: needs 2 slots, 1 of 6 is free")
    late = await complete(http)
    assert (late.status_code, late.headers["retry-after"]) == (503, "7")
    error = late.json()["error"]
    assert error["code"] == "unavailable"
    assert error["message"] == (
        "letters@v1 is starting (starts: parked: needs 2 slots, 1 of 6 is free): ask again in a moment"
    )
    set_hold(gateway, wait_s=30.0)
    first = asyncio.create_task(complete(http))
    await eventually(lambda: gateway.generations.held.waiting == 1)
    assert [each.value for each in gateway.readings() if each.metric is metrics.SERVICE_HELD] == [1]
    beyond = await complete(http)
    assert (beyond.status_code, beyond.headers["retry-after"]) == (503, "7")
    assert "1 requests wait here" in beyond.json()["error"]["message"]
    # One that a person parks meanwhile will not start: nobody waits for it.
    await sleeper.say(VersionState.IMPAIRED, "parked by ruth")
    refused = await first
    assert refused.status_code == 503
    assert refused.json()["error"]["message"].startswith("letters@v1 is impaired (parked by ruth)")


async def test_a_stage_without_anybody_refuses_at_once(
    sleeper: Sleeper, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await sleeper.say(VersionState.IMPAIRED, "stage 0 has no instance")
    response = await complete(http)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert sleeper.orders == []


async def test_who_waits_takes_no_place_of_what_can_be_answered(
    sleeper: Sleeper, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await sleeper.say(VersionState.IDLE)
    held = gateway.generations.held
    set_hold(gateway, most_each=3 * OPEN)
    asked = []
    for number in range(3 * OPEN):
        if number % 3:
            asked.append(asyncio.create_task(complete(http, stream=number % 3 == 2)))
        else:
            body = {"model": "letters", "input": "abc"}
            asked.append(asyncio.create_task(http.post("/v1/embeddings", json=body, headers=RUTH)))
        await eventually(lambda: held.waiting == len(asked))
    assert (await http.get("/v1/models", headers=ROB)).status_code == 200
    # One user's requests fill no more than that user's part.
    beyond = await complete(http)
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (429, "rate_limited")
    assert f"{3 * OPEN} requests of yours wait" in beyond.json()["error"]["message"]
    asked.append(asyncio.create_task(complete(http, ROB)))
    await eventually(lambda: held.waiting == len(asked))
    await sleeper.start()
    await sleeper.say(VersionState.READY)
    assert [response.status_code for response in await asyncio.gather(*asked)] == [200] * len(asked)
    assert gateway.http is not None
    assert (gateway.http.load.asking, gateway.http.hub.open) == (0, 0)
