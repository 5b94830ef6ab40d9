"""Draft §4.3, Type 1: a service registers, says that it lives, registers again, and takes its leave."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient, RegistrationTimes
from bus.nats.dialer import ConnectionTimes
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind
from schemas.errors import Ack, Fenced, IllegalTransition, Unavailable
from schemas.registry import InstanceState
from schemas.signals import RegistrationLease
from tests.conftest import Connect
from tests.integration.bus.records import Collector, service_record
from tests.patience import NEVER_S, PATIENCE_S


class Registry:
    """Answers as the registry does, and keeps what it was told."""

    def __init__(self, expiry_s: float = 30.0) -> None:
        self.expiry_s = expiry_s
        self.registrations = Collector()
        self.beats = Collector()
        self.changes = Collector()
        self.refuse = False
        self.full = False

    async def serve(self, bus: Bus) -> None:
        await bus.serve(subjects.REGISTRATION, self.register)
        await bus.serve(subjects.STATE_CHANGE, self.change)
        await bus.subscribe(subjects.HEARTBEAT, self.beats)

    async def register(self, message, envelope):
        await self.registrations(message)
        if self.full:
            raise Unavailable("the bus's store is full")
        if self.refuse:
            raise Fenced("a newer incarnation has this name")
        return RegistrationLease(
            sid=message.record.sid, route_id=7, heartbeat_s=0.05, expiry_s=self.expiry_s, revision=1
        )

    async def change(self, message, envelope):
        await self.changes(message)
        if self.full:
            raise Unavailable("the bus's store is full")
        return Ack()


async def test_registers_beats_and_leaves(connect: Connect) -> None:
    registry, service = Registry(), await connect("service")
    await registry.serve(await connect("registry"))
    record = service_record("svc", state=InstanceState.PENDING)
    async with RegistrationClient(service, record) as presence:
        assert presence.lease.route_id == 7
        assert presence.record.route_id == 7
        await registry.beats.until(3)
        await presence.change(InstanceState.ACTIVE, "built")
        with pytest.raises(IllegalTransition):
            await presence.change(InstanceState.PENDING)
        await registry.beats.until(lambda beats: beats[-1].state is InstanceState.ACTIVE)
    assert [change.state for change in registry.changes.items] == [InstanceState.ACTIVE, InstanceState.GONE]
    assert registry.registrations.items[0].record == record
    count = len(registry.beats.items)
    await service.barrier()
    await asyncio.sleep(0.15)
    assert len(registry.beats.items) <= count + 1  # the beats have ended


async def test_the_digest_changes_with_what_is_registered(connect: Connect) -> None:
    registry, service = Registry(), await connect("service")
    await registry.serve(await connect("registry"))
    async with RegistrationClient(service, service_record("dig")) as presence:
        await registry.beats.until(1)
        first = registry.beats.items[-1].digest
        await presence.update(version="2")
        await registry.beats.until(lambda beats: beats[-1].digest != first)
        assert registry.registrations.items[-1].record.version == "2"


async def test_registers_again_before_it_expires(connect: Connect) -> None:
    registry, service = Registry(expiry_s=0.1), await connect("service")
    await registry.serve(await connect("registry"))
    async with RegistrationClient(service, service_record("again")):
        await registry.registrations.until(3)


async def test_a_fenced_incarnation_falls_silent_and_knows_it(connect: Connect) -> None:
    registry, service = Registry(expiry_s=0.1), await connect("service")
    await registry.serve(await connect("registry"))
    async with RegistrationClient(service, service_record("fenced")) as presence:
        registry.refuse = True
        await asyncio.wait_for(presence.fenced.wait(), PATIENCE_S)


async def test_registers_again_after_a_reconnect(own_server: EmbeddedServer) -> None:
    registry = Registry(expiry_s=NEVER_S)
    async with (
        Bus.connect(own_server.url, name="registry", kind=EntityKind.SERVICE_REGISTRY) as there,
        Bus.connect(own_server.url, name="service", kind=EntityKind.CLIENT) as service,
    ):
        await registry.serve(there)
        async with RegistrationClient(service, service_record("svc")):
            assert len(registry.registrations.items) == 1
            await own_server.restart()
            await registry.registrations.until(2)
            count = len(registry.beats.items)
            await registry.beats.until(count + 2)


async def test_whoever_leaves_gives_a_registry_that_is_gone_up(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, there, service = Registry(), await connect("registry"), await connect("service")
    await registry.serve(there)
    given_up = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async with RegistrationClient(service, service_record("svc")):
        monkeypatch.setattr(service, "command", never)
    assert given_up.is_set()


async def test_a_registry_that_can_not_write_now_is_asked_again(
    connect: Connect,
) -> None:
    """Its store is full, for instance: whoever registers does not end of that."""
    registry, service = Registry(expiry_s=NEVER_S), await connect("service")
    registry.full = True
    await registry.serve(await connect("registry"))
    times = RegistrationTimes(again_s=0.05)
    entering = asyncio.create_task(entered(RegistrationClient(service, service_record("svc"), times=times)))
    await registry.registrations.until(3)
    registry.full = False
    presence = await asyncio.wait_for(entering, PATIENCE_S)
    registry.full = True
    told = len(registry.registrations.items)
    await presence.tell(InstanceState.DRAINING, "stopping")  # no change now: by the next registration
    await registry.registrations.until(told + 1)
    assert registry.registrations.items[-1].record.state is InstanceState.DRAINING
    registry.full = False
    await presence.__aexit__(None, None, None)


async def entered(presence: RegistrationClient) -> RegistrationClient:
    return await presence.__aenter__()


async def test_a_server_that_stands_still_is_no_registry_that_is_not_there(
    own_server: EmbeddedServer,
) -> None:
    registry = Registry(expiry_s=NEVER_S)
    async with (
        Bus.connect(own_server.url, name="registry", kind=EntityKind.SERVICE_REGISTRY) as there,
        Bus.connect(own_server.url, name="service", kind=EntityKind.CLIENT) as service,
    ):
        await registry.serve(there)
        presence = RegistrationClient(service, service_record("svc"), register_s=ConnectionTimes.gap_s + 0.5)
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            entering = asyncio.create_task(entered(presence))
            await asyncio.sleep(2 * (ConnectionTimes.gap_s + 0.5))
            assert not entering.done()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await (await asyncio.wait_for(entering, PATIENCE_S)).__aexit__(None, None, None)
