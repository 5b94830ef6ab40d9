"""A server that is guarded: two responders, users of every role, and the mesh's root."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio

from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.security.credentials import new_root
from bus.server.embedded import EmbeddedServer
from entities.authorizer.access.authentication import User, Users
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer
from entities.broker import brokering
from schemas.envelope import EntityKind
from schemas.signals import Role

TOKENS = {role: f"the token of a {role}" for role in Role}


class AnyJob:
    """Jobs as a doorkeeper knows them where a test has no records of them: every one is going."""

    ended: frozenset[str] = frozenset()

    class Every(frozenset[str]):
        def __contains__(self, job: object) -> bool:
            return True

    going = Every()

    async def news(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Guarded:
    """`users` may be changed; `doorkeepers` say what they did."""

    server: EmbeddedServer
    root: str
    keys: GuardKeys
    users: list[User]
    doorkeepers: list[ConnectionAuthorizer]

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def reasons(self) -> str:
        return "; ".join(reason for one in self.doorkeepers for reason in one.reasons)


@contextlib.asynccontextmanager
async def guarded(folder: Path, responders: int = 2) -> AsyncIterator[Guarded]:
    root = new_root()
    keys = GuardKeys.generate(root)
    users = [
        User(name=f"{role}-one", role=role, token_sha256=hashlib.sha256(token.encode()).hexdigest())
        for role, token in TOKENS.items()
    ]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(folder, guard=keys, sync_always=False))
        doorkeepers = [
            ConnectionAuthorizer(keys, lambda: Users(listed=tuple(users)), jobs=AnyJob())
            for _ in range(responders)
        ]
        for number, doorkeeper in enumerate(doorkeepers):
            await stack.enter_async_context(doorkeeper.answering([server.url], f"guard-{number}"))
        yield Guarded(server, root, keys, users, doorkeepers)


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A guarded server with streams and buckets, and a broker."""
    async with guarded(tmp_path / "nats") as found, brokering([found.url], found.root, "broker"):
        maker = Bus.connect(found.url, name="orchestrator", kind=EntityKind.ORCHESTRATOR, token=found.root)
        async with maker as bus:
            await bus.provision()
        yield found
