"""Several registries, closed connections, pages and names taken twice, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.mesh.discovery import resolve
from bus.mesh.registration import RegistrationClient
from bus.server.embedded import EmbeddedServer
from entities.presence.registry_view import RegistryFollower
from entities.service_registry.advertiser import AdvertiseConfig
from entities.service_registry.core import RegistrationLeaseConfig
from entities.service_registry.service import ServiceRegistry, ServiceRegistryConfig
from schemas.envelope import EntityKind
from schemas.errors import BadMessage
from schemas.leadership import Leadership
from schemas.registry import Heartbeat, InstanceState, Resolve
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial, Start, end
from tests.integration.entities.test_service_registry import follow, move, register
from tests.integration.entities.test_service_registry import resolve as ask
from tests.patience import PATIENCE_S
from tests.waiting import eventually

S = InstanceState
SRD = EntityKind.SERVICE_REGISTRY
ROLE = "service-registry"
TOKEN = "dmsc:secret"


# --- several registries ----------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def registries(url: str, count: int) -> AsyncIterator[dict[int, asyncio.subprocess.Process]]:
    processes = {}
    try:
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dmsc", "run", "service-registry", "--log-level", "error"),
                env={**os.environ, "DMSC_BUS": url},
            )
            processes[process.pid] = process
        yield processes
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


async def leads(bus: Bus) -> Leadership | None:
    entry = await bus.bucket(subjects.LEADERSHIP).get(leader=True, role=ROLE)
    return None if entry is None else entry.message


async def stands_by(bus: Bus) -> bool:
    found = await resolve(bus, Resolve(kind=SRD, state=S.PENDING))
    return bool(found.records)


async def test_the_leading_registry_is_killed_and_no_record_is_lost(
    own_server: EmbeddedServer, dial: Dial
) -> None:
    bus = await dial("agent", EntityKind.CLUSTER)
    follower, task = await follow_soon(bus)
    async with registries(own_server.url, 2) as processes:
        before = [await register(bus, instance(f"j-s0-r{number}")) for number in range(20)]
        await move(bus, "j-s0-r3", "i1", S.FAULTED, "signal 9")
        await eventually(lambda: stands_by(bus))
        first = await leads(bus)
        assert first is not None
        processes[first.pid].kill()
        async with asyncio.timeout(PATIENCE_S):
            late = await register(bus, instance("j-s1-r0"))
        second = await leads(bus)
        assert second is not None
        assert (second.term, second.pid != first.pid) == (first.term + 1, True)
        found = {record.sid: record for record in (await resolve(bus, Resolve(job="j"))).records}
        assert found.keys() == {*(f"j-s0-r{number}" for number in range(20)), "j-s1-r0"}
        kept = [found[f"j-s0-r{number}"].route_id for number in range(20)]
        assert kept == [lease.route_id for lease in before]
        assert found["j-s0-r3"].reason == "signal 9"
        assert late.revision > before[-1].revision
        await eventually(lambda: "j-s1-r0" in follower.view.records)
        assert follower.view.records["j-s0-r3"].state is S.FAULTED
    await end(task)


async def test_one_that_was_frozen_while_another_led_says_and_writes_nothing(
    own_server: EmbeddedServer, dial: Dial
) -> None:
    bus = await dial("agent", EntityKind.CLUSTER)
    async with registries(own_server.url, 2):
        await register(bus, instance(incarnation="old"))
        await eventually(lambda: stands_by(bus))
        first = await leads(bus)
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)
        # What it is asked while it sleeps waits in its socket; the other one answers the repetition.
        async with asyncio.timeout(PATIENCE_S):
            await register(bus, instance(incarnation="new", state=S.PENDING))
        os.kill(first.pid, signal.SIGCONT)
        await eventually(lambda: stands_by(bus))  # it stands by now
        second = await leads(bus)
        assert second is not None
        assert second.pid != first.pid
        (record,) = (await ask(bus, sid="j-s0-r0")).records
        assert (record.incarnation, record.state, record.replaced) == ("new", S.PENDING, ("old",))
        entry = await bus.bucket(subjects.REGISTRY_RECORD).get(leader=True, sid="j-s0-r0")
        assert entry is not None
        assert entry.message == record


async def follow_soon(bus: Bus) -> tuple[RegistryFollower, asyncio.Task[None]]:
    """A follower that need not be current yet."""
    follower = RegistryFollower(bus)
    return follower, asyncio.create_task(follower.follow())


# --- closed connections ----------------------------------------------------------------------------------
PATIENT = ServiceRegistryConfig(
    lease=RegistrationLeaseConfig(heartbeat_s=0.1, expiry_s=600.0, departed_s=0.5, tick_s=0.1)
)
"""Silence alone takes ten minutes here: what is noticed in a test, the server said."""


@pytest.fixture
async def telling_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """Tells of closed connections, as the one of `dmsc up` does."""
    async with EmbeddedServer(tmp_path / "telling", token=TOKEN, sync_always=False) as server:
        yield server


@contextlib.asynccontextmanager
async def connected(url: str, name: str, kind: EntityKind) -> AsyncIterator[Bus]:
    async with Bus.connect(url, name=name, kind=kind, token=TOKEN) as bus:
        yield bus


async def test_a_closed_connection_is_noticed_by_what_the_server_says(
    telling_server: EmbeddedServer, start: Start
) -> None:
    url = telling_server.url
    async with (
        connected(url, "service-registry", SRD) as own,
        connected(url, "j-s0-r1", EntityKind.INSTANCE) as alive,
    ):
        task = await start(ServiceRegistry(own, PATIENT))
        async with RegistrationClient(alive, instance("j-s0-r1", incarnation=alive.sender.incarnation)):
            async with connected(url, "j-s0-r0", EntityKind.INSTANCE) as dying:
                await register(dying, instance("j-s0-r0"))
            follower, following = await follow(alive)
            assert await follower.wait_for(
                lambda view: view.records["j-s0-r0"].state is S.FAULTED, PATIENCE_S
            )
            assert follower.view.records["j-s0-r0"].reason.startswith("its connection closed (Client Closed)")
            assert follower.view.records["j-s0-r1"].state is S.ACTIVE
            await end(following)
        await end(task)


async def test_a_reconnect_is_no_death(telling_server: EmbeddedServer, start: Start) -> None:
    url = telling_server.url
    async with (
        connected(url, "service-registry", SRD) as own,
        connected(url, "j-s0-r0", EntityKind.INSTANCE) as bus,
    ):
        registry = ServiceRegistry(own, PATIENT)
        task = await start(registry)
        async with RegistrationClient(bus, instance("j-s0-r0", incarnation=bus.sender.incarnation)):
            for count in range(1, 4):
                await bus.raw.force_reconnect()
                await eventually(lambda count=count: bus.counters.reconnects == count)
            await asyncio.sleep(2 * PATIENT.lease.departed_s)  # long enough for a wrong verdict to show
            (record,) = (await ask(bus, sid="j-s0-r0")).records
            assert record.state is S.ACTIVE
        await end(task)


async def test_a_forged_hint_harms_nobody(telling_server: EmbeddedServer, start: Start) -> None:
    """Everybody may publish there; nonsense is counted."""
    url = telling_server.url
    async with (
        connected(url, "service-registry", SRD) as own,
        connected(url, "j-s0-r0", EntityKind.INSTANCE) as bus,
    ):
        await start(ServiceRegistry(own, PATIENT))
        async with RegistrationClient(bus, instance("j-s0-r0", incarnation=bus.sender.incarnation)):
            forged = (
                f'{{"client": {{"name": "j-s0-r0/{bus.sender.incarnation}"}}, "reason": "Client Closed"}}'
            )
            for payload in (forged.encode(), b"", b"{", b"[]", b'{"client": 3}', b'{"client": {"name": 3}}'):
                await bus.connection.send(subjects.DISCONNECTED, payload)
            await eventually(lambda: own.counters.dead_letters == 5)
            await asyncio.sleep(2 * PATIENT.lease.departed_s)
            (record,) = (await ask(bus, sid="j-s0-r0")).records
            assert record.state is S.ACTIVE


# --- large answers, abuse --------------------------------------------------------------------------------
async def test_many_watchers_at_once_get_a_large_state_in_pages(dial: Dial, start: Start) -> None:
    config = ServiceRegistryConfig(page_records=16, advertise=AdvertiseConfig(chunk_records=16))
    await start(ServiceRegistry(await dial("service-registry", SRD), config))
    bus = await dial("agent", EntityKind.CLUSTER)
    await asyncio.gather(*(register(bus, instance(f"j-s0-r{number}")) for number in range(100)))
    assert (await ask(bus, job="j")).next_after > 0
    assert len((await resolve(bus, Resolve(job="j"))).records) == 100
    followers = [await follow_soon(bus) for _ in range(8)]
    more = [register(bus, instance(f"k-s0-r{number}")) for number in range(100)]
    await asyncio.gather(*more)  # the state changes while it is read
    for follower, task in followers:
        assert await follower.wait_for(lambda view: len(view.records) == 201, PATIENCE_S)
        await end(task)


async def test_of_two_that_take_one_name_one_stays_and_the_other_is_told(
    registry: ServiceRegistry, dial: Dial
) -> None:
    one, two = await dial("j-s0-r0", EntityKind.INSTANCE), await dial("j-s0-r0", EntityKind.INSTANCE)
    async with contextlib.AsyncExitStack() as stack:
        presences = [
            RegistrationClient(bus, instance(incarnation=bus.sender.incarnation)) for bus in (one, two)
        ]
        await asyncio.gather(*(stack.enter_async_context(presence) for presence in presences))
        for presence in presences:
            presence._again.set()  # the next renewal, at once
        await eventually(lambda: any(presence.fenced.is_set() for presence in presences))
        (record,) = (await ask(one, sid="j-s0-r0")).records
        assert [record.incarnation] == [p.record.incarnation for p in presences if not p.fenced.is_set()]


async def test_nothing_depends_on_the_senders_clock(
    registry: ServiceRegistry, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent a day ago, or will be tomorrow, counts from when it came."""
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    for skew_s in (-86_400.0, 0.0, 86_400.0, float("nan"), -1e300):
        monkeypatch.setattr("bus.wire.codec.time.time", lambda skew_s=skew_s: 1_700_000_000.0 + skew_s)
        await register(bus, instance(version=str(skew_s)))
        beat = Heartbeat(sid="j-s0-r0", incarnation="i1", state=S.ACTIVE)
        await bus.publish(subjects.HEARTBEAT, beat, sid="j-s0-r0")
    (record,) = (await ask(bus, sid="j-s0-r0")).records
    assert (record.state, record.version) == (S.ACTIVE, "-1e+300")
    assert registry.core.stale_beats == 0


async def test_large_records_go_in_as_many_messages_as_they_need(
    registry: ServiceRegistry, dial: Dial
) -> None:
    bus = await dial("agent", EntityKind.CLUSTER)
    follower, task = await follow(bus)
    large = [instance(f"j-s0-r{number}", version="x" * 60_000) for number in range(40)]
    await asyncio.gather(*(register(bus, record) for record in large))
    assert await follower.wait_for(lambda view: len(view.records) == 41, PATIENCE_S)
    late, later = await follow_soon(bus)
    assert await late.wait_for(lambda view: len(view.records) == 41, PATIENCE_S)
    with pytest.raises(BadMessage, match="the registry takes"):
        await register(bus, instance("j-s1-r0", version="x" * 70_000))
    await register(bus, instance("j-s1-r0"))
    for following in (task, later):
        await end(following)


async def test_a_prefix_that_nobody_serves_is_an_empty_answer(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("client")
    for prefix in ("train/nobody", "", "/", "train//", "train/" + "x" * 10_000):
        assert (await ask(bus, prefix=prefix)).records == ()
