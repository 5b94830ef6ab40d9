"""The tap for browsers on a guarded bus: it listens as its user, held to that role by the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.guard.permissions import PRIVATE
from bus.security.credentials import issue
from bus.security.identity import Identity
from entities.gateway.dashboard.tap_stream import TapSessions
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope
from schemas.errors import Refused
from schemas.gateway_api import MeshQuery, MeshStatus, TapScope
from schemas.registry import Heartbeat, InstanceState
from schemas.signals import Role
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.patience import PATIENCE_S
from tests.waiting import beside

VIEWER = TapScope(user="vera", role=Role.VIEWER, everything=False, hidden=tuple(row.name for row in PRIVATE))
OPERATOR = TapScope(user="olga", role=Role.OPERATOR, everything=True)


def bus_of(mesh: Guarded, name: str, kind: K, **where: str) -> Any:
    token = issue(mesh.root, Identity(name=name, kind=kind, **where))
    return Bus.connect(mesh.url, name=name, kind=kind, token=token, connect_timeout_s=PATIENCE_S)


@asynccontextmanager
async def talking(mesh: Guarded) -> AsyncIterator[None]:
    """Heartbeats, and questions to the orchestrator with their answers."""

    async def answer(message: MeshQuery, envelope: Envelope) -> MeshStatus:
        return MeshStatus(services=(), nodes=(), jobs=())

    async with (
        bus_of(mesh, "orchestrator", K.ORCHESTRATOR) as orchestrator,
        bus_of(mesh, "gateway-b", K.GATEWAY, cluster="b") as asker,
    ):
        await orchestrator.serve(subjects.MESH_QUERY, answer)

        async def talk() -> None:
            while True:
                said = Heartbeat(sid="orchestrator", incarnation="x", state=InstanceState.ACTIVE, digest="0")
                await orchestrator.publish(subjects.HEARTBEAT, said, sid="orchestrator")
                await asker.request(subjects.MESH_QUERY, MeshQuery(), timeout_s=PATIENCE_S)
                await asyncio.sleep(0.05)

        async with beside(talk()):
            yield


def told(frame: bytes) -> Any:
    lines = frame.decode().splitlines()
    return json.loads(next(line[6:] for line in lines if line.startswith("data: ")))


async def seen(frames: AsyncGenerator[bytes, None], wanted: set[str]) -> tuple[Any, list[Any]]:
    """What it began with, and its messages until all these tones and subjects were among them."""
    messages: list[Any] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(frames):
        ready = told(await anext(frames))
        async for frame in frames:
            if frame.startswith(b"event: messages"):
                messages += told(frame)["messages"]
            if wanted <= {value for one in messages for value in (one["tone"], one["subject"])}:
                break
    return ready, messages


async def test_a_viewer_hears_whole_domains_less_what_is_private_and_no_answers(mesh: Guarded) -> None:
    async with bus_of(mesh, "gateway-a", K.GATEWAY, cluster="a") as bus, talking(mesh):
        rooms = TapSessions(bus)
        with pytest.raises(Refused):  # the server allows rows, and nothing that goes beyond one
            await bus.connection.subscribe("dmsc.v1.registry.>", None)
        wanted = {"registry.heartbeat.orchestrator", "mesh.query"}
        frames = rooms.stream(["registry.>", "mesh.>"], [], True, VIEWER, TOKENS[Role.VIEWER])
        ready, messages = await seen(frames, wanted)
    assert not ready["answers"]
    assert "access" in ready["hidden"]
    assert ready["patterns"] == ["registry.>", "mesh.>"]
    assert "reply" not in {one["tone"] for one in messages}


async def test_an_operator_sees_answers_and_the_gateway_needs_no_right_to_them(mesh: Guarded) -> None:
    async with bus_of(mesh, "gateway-a", K.GATEWAY, cluster="a") as bus, talking(mesh):
        with pytest.raises(Refused):
            await bus.connection.subscribe("_INBOX.>", None)
        rooms = TapSessions(bus)
        frames = rooms.stream([">"], [], True, OPERATOR, TOKENS[Role.OPERATOR])
        ready, messages = await seen(frames, {"reply"})
    assert ready["answers"]
    assert ready["hidden"] == []
    assert any(one["tone"] == "reply" and one["sender"] == "orchestrator" for one in messages)


async def test_a_token_is_held_to_its_own_role_whatever_the_gateway_believes(mesh: Guarded) -> None:
    async with bus_of(mesh, "gateway-a", K.GATEWAY, cluster="a") as bus:
        frames = TapSessions(bus).stream(["signal.access.*"], [], False, OPERATOR, TOKENS[Role.VIEWER])
        with pytest.raises(Refused):
            await anext(frames)
