"""A server whose guard is away, and questions to the guard that no server asks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.nats.client import NatsConnection
from bus.nats.dialer import KeyUser
from entities.authorizer.access.authentication import Users
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer
from schemas.envelope import EntityKind as K
from schemas.errors import BusUnreachable, NoResponders
from schemas.registry import Resolve
from tests.integration.guard.conftest import AnyJob, Guarded, guarded
from tests.integration.guard.test_threats import SMO, bus_of
from tests.patience import PATIENCE_S


# --- the guard itself ---------------------------------------------------------------------------------------
async def test_without_a_guard_nobody_comes_in_and_whoever_waits_does_when_it_is_back(tmp_path: Any) -> None:
    async with guarded(tmp_path, responders=1) as mesh:
        await mesh.server.restart()
        async with bus_of(mesh, SMO) as bus:
            assert bus.connected
    async with guarded(tmp_path / "other", responders=0) as mesh:
        began = asyncio.create_task(_connected(mesh))
        with pytest.raises(BusUnreachable, match="its authorizer does not answer"):
            await Bus.connect(
                mesh.url, name="x", kind=K.CLIENT, token=mesh.root, connect_timeout_s=1.5
            ).__aenter__()
        async with ConnectionAuthorizer(mesh.keys, Users, jobs=AnyJob()).answering([mesh.url], "late"):
            async with asyncio.timeout(PATIENCE_S):
                await began


async def _connected(mesh: Guarded) -> None:
    async with bus_of(mesh, SMO):
        pass


async def test_questions_that_no_server_asks_are_counted_and_left(mesh: Guarded) -> None:
    link = NatsConnection(
        [mesh.url], name="x", label="x/0", token=KeyUser(mesh.keys.guard), inbox_prefix="_INBOX.x"
    )
    await link.open(PATIENCE_S)
    try:
        for data in (b"", b"xkv1", b"{}", json.dumps({"nats": {}}).encode(), b"\xff" * 100):
            await link.send("$SYS.REQ.USER.AUTH", data, reply="_INBOX.x.1")
        await link.barrier()
    finally:
        await link.close()
    async with bus_of(mesh, SMO) as bus:
        assert bus.connected
    with pytest.raises(NoResponders):
        async with bus_of(mesh, SMO) as bus:
            await bus.request(subjects.RESOLVE, Resolve(), timeout_s=PATIENCE_S)
