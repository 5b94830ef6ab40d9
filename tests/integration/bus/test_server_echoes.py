"""A judge of silence on a bus of several servers: any of them may stand still, whichever the judge is on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.nats.dialer import ConnectionTimes
from bus.nats.liveness import BusLiveness
from bus.security.credentials import new_root
from bus.server.embedded import EmbeddedServer
from bus.server.embedded_cluster import EmbeddedCluster
from entities.authorizer.access.authentication import Users
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer
from schemas.envelope import EntityKind
from tests.integration.guard.conftest import AnyJob
from tests.waiting import eventually

STANDS_STILL_S = ConnectionTimes.gap_s + 2.0
ON_ITS_WAY_S = ConnectionTimes.beat_s
"""An echo that a server sent before it stood still may return after the clock was read."""


@contextlib.contextmanager
def frozen(server: EmbeddedServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def until_all_return(pulse: BusLiveness, servers: int = 3) -> None:
    await eventually(lambda: pulse.servers == servers)


async def until_it_goes(pulse: BusLiveness, seconds: float) -> float:
    """How long that took."""
    began, before = time.monotonic(), pulse.now()
    await eventually(lambda: pulse.now() - before >= seconds)
    return time.monotonic() - began


async def test_the_clock_stands_while_any_server_does(tmp_path: Path) -> None:
    async with (
        EmbeddedCluster(tmp_path / "nats", size=3, sync_always=False) as cluster,
        Bus.connect(
            cluster.urls[0], name="judge", kind=EntityKind.CLIENT
        ) as judge,  # it learns of the others
    ):
        pulse = judge.pulse
        pulse.attend()
        with pulse.held():
            await until_all_return(pulse)
            for server in reversed(cluster.servers):  # its own comes last
                with frozen(server):
                    before = pulse.now()
                    await asyncio.sleep(STANDS_STILL_S)  # it is this long that the server does
                    assert pulse.now() - before <= ConnectionTimes.gap_s + ON_ITS_WAY_S
                    assert pulse.silent_s > 0, server.url
                    assert judge.connected, "it was noticed by other means"
                await eventually(lambda: not pulse.silent_s)
                assert await until_it_goes(pulse, 1.0) >= 1.0


async def test_nobody_waits_for_a_server_that_died(tmp_path: Path) -> None:
    async with (
        EmbeddedCluster(tmp_path / "nats", size=3, sync_always=False) as cluster,
        Bus.connect(cluster.urls[0], name="judge", kind=EntityKind.CLIENT) as judge,
    ):
        pulse = judge.pulse
        pulse.attend()
        with pulse.held():
            await until_all_return(pulse)
            await cluster.servers[2].kill()
            await until_all_return(pulse, 2)
            await until_it_goes(pulse, 2 * ConnectionTimes.gap_s)
            await cluster.servers[2].start()
            await until_all_return(pulse)  # and now it counts again
            with frozen(cluster.servers[2]):
                await eventually(lambda: pulse.silent_s > 0)


async def test_a_server_that_is_silent_for_longer_than_its_clients_wait_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = ConnectionTimes(echo_silent_most_s=3.0)
    async with (
        EmbeddedCluster(tmp_path / "nats", size=3, sync_always=False) as cluster,
        Bus.connect(cluster.urls[0], name="judge", kind=EntityKind.CLIENT, connection_times=times) as judge,
    ):
        pulse = judge.pulse
        pulse.attend()
        with pulse.held():
            await until_all_return(pulse)
            with frozen(cluster.servers[1]):
                assert await until_it_goes(pulse, ConnectionTimes.gap_s + 1.0) >= 3.0
            await until_all_return(pulse)  # it answers, and counts again


async def test_one_server_alone_gets_no_connection_more(tmp_path: Path) -> None:
    async with (
        EmbeddedServer(tmp_path / "nats", sync_always=False) as server,
        Bus.connect(server.url, name="judge", kind=EntityKind.CLIENT) as judge,
    ):
        judge.pulse.attend()
        with judge.pulse.held():
            await until_it_goes(judge.pulse, 2 * ConnectionTimes.echo_look_s)
            connections = psutil.Process(server.pid).net_connections("tcp")
            to_clients = [one for one in connections if one.status == psutil.CONN_ESTABLISHED]
            assert len(to_clients) == 1
            assert judge.pulse.servers == 0


@pytest.mark.parametrize("kind", [EntityKind.SERVICE_REGISTRY, EntityKind.ORCHESTRATOR, EntityKind.GATEWAY])
async def test_a_guard_lets_a_judge_hear_each_server(tmp_path: Path, kind: EntityKind) -> None:
    root = new_root()
    keys = GuardKeys.generate(root)
    door = ConnectionAuthorizer(keys, Users, jobs=AnyJob())
    async with (
        EmbeddedCluster(tmp_path / "nats", size=3, guard=keys, sync_always=False) as cluster,
        door.answering(list(cluster.urls), "guard-1"),
        Bus.connect(cluster.urls, name="judge", kind=kind, token=root, connect_timeout_s=30.0) as judge,
    ):
        judge.pulse.attend()
        with judge.pulse.held():
            await until_all_return(judge.pulse)
            with frozen(cluster.servers[1]):
                await eventually(lambda: judge.pulse.silent_s > 0)
            await eventually(lambda: not judge.pulse.silent_s)
        assert judge.counters.denied == 0
