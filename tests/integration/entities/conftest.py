"""A nats-server per test, connections to it, and entities that run until the test ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import pytest_asyncio

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.config import HttpConfig
from entities.orchestrator import Orchestrator, OrchestratorConfig
from entities.service_registry.core import RegistrationLeaseConfig
from entities.service_registry.service import ServiceRegistry, ServiceRegistryConfig
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from tests.integration.entities.serving_stand_in import Served, StandInInstance, deploy
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually

QUICK = RegistrationLeaseConfig(heartbeat_s=0.2, expiry_s=0.9, tick_s=0.1)
"""Leases for tests of expiry."""


class Entity(Protocol):
    async def run(self, ready: asyncio.Event | None = None) -> None: ...


Dial = Callable[..., Awaitable[Bus]]
Start = Callable[[Entity], Awaitable[asyncio.Task[None]]]


@pytest_asyncio.fixture
async def dial(own_server: EmbeddedServer) -> AsyncIterator[Dial]:
    """`bus = await dial("router-east", EntityKind.ROUTER)`: a connection to this test's server."""
    async with AsyncExitStack() as stack:

        async def make(name: str, kind: EntityKind = EntityKind.CLIENT, **options: Any) -> Bus:
            bus = await stack.enter_async_context(
                Bus.connect(own_server.url, name=name, kind=kind, **options)
            )
            await bus.provision()
            return bus

        yield make


@pytest_asyncio.fixture
async def start(dial: Dial) -> AsyncIterator[Start]:
    """`await start(entity)` runs it and returns once it is ready; all end with the test, last one first."""
    running: list[asyncio.Task[None]] = []

    async def begin(entity: Entity) -> asyncio.Task[None]:
        ready = asyncio.Event()
        task = asyncio.create_task(entity.run(ready))
        running.append(task)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        assert ready.is_set(), f"{type(entity).__name__} was not ready after {PATIENCE_S:.0f} s"
        return task

    yield begin
    for task in reversed(running):
        await end(task)


async def end(task: asyncio.Task[None]) -> None:
    """Ends an entity as its runner does; anything that it raises fails the test."""
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    assert task.done(), "the entity did not end"
    if not task.cancelled():
        task.result()


@pytest_asyncio.fixture
async def registry(dial: Dial, start: Start) -> ServiceRegistry:
    """A running registry with the default leases."""
    bus = await dial("service-registry", EntityKind.SERVICE_REGISTRY)
    service = ServiceRegistry(bus, ServiceRegistryConfig())
    await start(service)
    return service


@pytest_asyncio.fixture
async def smo(dial: Dial) -> StandInOrchestrator:
    """What a gateway or a router needs of the SMO."""
    stand_in = StandInOrchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR))
    await stand_in.serve()
    return stand_in


async def mesh_without_nodes(
    dial: Dial, start: Start, folder: Path, access: str, users: Mapping[str, str]
) -> str:
    """The URL of a mesh in which all that is submitted waits. `users`: name, which is the token, to role."""
    (folder / "access.yaml").write_text(access)
    file = write_users(folder / "tokens.yaml", *((name, role, name) for name, role in users.items()))
    config = AuthorizerConfig(tokens_file=file, access_file=folder / "access.yaml")
    await start(Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config))
    await start(Orchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR), OrchestratorConfig()))
    gateway = Gateway(await dial("gateway-a", EntityKind.GATEWAY), GatewayConfig(cluster="a", http_port=0))
    await start(gateway)
    assert gateway.url is not None
    return gateway.url


@pytest.fixture
def door() -> HttpConfig:
    """The bounds of `gateway`'s HTTP door; a module may have its own."""
    return HttpConfig()


@pytest_asyncio.fixture
async def gateway(
    dial: Dial, start: Start, authorizer: Authorizer, smo: StandInOrchestrator, door: HttpConfig
) -> Gateway:
    """The gateway of a cluster `east`, with its HTTP door open."""
    service = Gateway(
        await dial("gateway-east", EntityKind.GATEWAY),
        GatewayConfig(cluster="east", http_port=0, door=door),
    )
    await start(service)
    return service


@pytest_asyncio.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client at the gateway's door."""
    assert gateway.url is not None
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


@pytest_asyncio.fixture
async def served(dial: Dial, gateway: Gateway) -> AsyncIterator[Served]:
    """A service of two stages with two instances each."""
    bus = await dial("orchestrator-records", EntityKind.ORCHESTRATOR)
    instances = {}
    for stage in range(2):
        for replica in range(2):
            sid = f"serve1-s{stage}-r{replica}"
            instances[sid] = StandInInstance(await dial(sid, EntityKind.INSTANCE), sid, 2)
            await instances[sid].start()
    await deploy(bus)
    view, book = gateway.follower.view, gateway.generations.book
    await eventually(lambda: all(len(view.active(job="serve1", stage=stage)) == 2 for stage in range(2)))
    await eventually(lambda: book.get("letters") is not None and gateway.jobs.cache.get("serve1") is not None)
    yield Served(bus, instances)
    for each in instances.values():
        await each.kill()


def bearer(user: str, **more: str) -> dict[str, str]:
    """Headers with a user's token, and `more`, `_` for `-`."""
    return {"Authorization": f"Bearer {user}"} | {key.replace("_", "-"): value for key, value in more.items()}


def write_users(path: Path, *users: tuple[str, str, str]) -> Path:
    """(name, role, token) each; replaced in one go, as careful editors do."""
    entries = [
        {"name": name, "role": role, "token_sha256": hashlib.sha256(token.encode()).hexdigest()}
        for name, role, token in users
    ]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"users": entries}))  # JSON is YAML
    os.replace(fresh, path)
    return path


@pytest_asyncio.fixture
async def authorizer(dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path) -> Authorizer:
    """A running authorizer with one user of each role, two researchers; each one's token is the name."""
    users = {"vera": "viewer", "ruth": "researcher", "rob": "researcher", "olga": "operator"}
    file = write_users(tmp_path / "tokens.yaml", *((name, role, name) for name, role in users.items()))
    service = Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), AuthorizerConfig(tokens_file=file))
    await start(service)
    return service


class Heard:
    """Everything that came on one row, to be waited for."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._more = asyncio.Condition()

    @classmethod
    async def on(cls, bus: Bus, row: Subject, **tokens: Any) -> Heard:
        heard = cls()
        await bus.subscribe(row, heard.take, **tokens)
        return heard

    async def take(self, message: Message, envelope: Envelope) -> None:
        async with self._more:
            self.messages.append(message)
            self._more.notify_all()

    async def until(self, fits: Callable[[Any], bool] = lambda message: True) -> Any:
        """The first message that fits, also of those that came before."""
        async with asyncio.timeout(PATIENCE_S), self._more:
            await self._more.wait_for(lambda: any(map(fits, self.messages)))
        return next(message for message in self.messages if fits(message))

    def clear(self) -> None:
        self.messages.clear()
