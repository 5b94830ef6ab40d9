"""Three servers as one bus: what was written survives the loss of any one of them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging.disconnects import subscribe_disconnects
from bus.messaging.key_value import Writing
from bus.nats import jetstream
from bus.server.embedded import EmbeddedServer
from bus.server.embedded_cluster import EmbeddedCluster, copies
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Unavailable
from tests.integration.bus.records import service_record
from tests.patience import PATIENCE_S

CLIENT = EntityKind.CLIENT
TOKEN = "dmsc:secret"


async def is_seen_to_leave(url: str, gone: asyncio.Queue[str]) -> bool:
    async with Bus.connect(url, name="carol", kind=CLIENT, token=TOKEN) as carol:
        name = f"carol/{carol.sender.incarnation}"
    try:
        async with asyncio.timeout(2.0):
            while await gone.get() != name:
                pass
    except TimeoutError:
        return False
    return True


async def test_a_key_survives_the_server_that_led_its_bucket(tmp_path: Path) -> None:
    async with (
        EmbeddedCluster(tmp_path / "nats", size=3, token=TOKEN, sync_always=False) as cluster,
        Bus.connect(cluster.urls, name="alice", kind=CLIENT, token=TOKEN) as alice,
    ):
        assert len(set(cluster.urls)) == 3
        await alice.provision(replicas=copies(3))
        bucket = alice.bucket(subjects.REGISTRY_RECORD)
        await bucket.put(service_record("a"), sid="a")
        many = [Writing({"sid": f"m{number}"}, service_record(f"m{number}"), 0) for number in range(50)]
        revisions = await bucket.write_many(many)
        assert revisions == list(range(revisions[0], revisions[0] + 50)), "one batch"

        gone: asyncio.Queue[str] = asyncio.Queue()
        await subscribe_disconnects(alice, lambda name, reason: gone.put_nowait(name))
        for url in cluster.urls:  # whichever server it was connected to
            async with asyncio.timeout(PATIENCE_S):
                while not await is_seen_to_leave(url, gone):
                    """The other servers hear of alice's interest a moment later."""
        info = await jetstream.call(alice.connection, "STREAM.INFO.KV_registry")
        assert info["config"]["num_replicas"] == 3
        leads = int(info["cluster"]["leader"].rpartition("-")[2]) - 1
        await cluster.servers[leads].kill()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    found = await bucket.get(leader=True, sid="a")
                    await bucket.put(service_record("b"), sid="b")
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)
        assert found is not None
        assert found.message.sid == "a"

        await cluster.servers[leads].start()
        said: asyncio.Queue[str] = asyncio.Queue()
        keeper = asyncio.create_task(cluster.keep(said.put_nowait))
        before = cluster.servers[0].pid
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert "died" in await said.get()
            async with Bus.connect(
                cluster.urls[0], name="bob", kind=CLIENT, token=TOKEN, connect_timeout_s=PATIENCE_S
            ):
                assert cluster.servers[0].pid not in (0, before)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def test_a_store_keeps_its_number_of_servers(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats", sync_always=False):
        pass
    with pytest.raises(BadInput, match=r"1 server\(s\), and 3 were asked for"):
        EmbeddedCluster(tmp_path / "nats", size=3)
    EmbeddedCluster(tmp_path / "nats", size=1)


def test_an_even_number_of_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="1, 3 or 5"):
        EmbeddedCluster(tmp_path / "nats", size=2)


def test_copies() -> None:
    assert [copies(size) for size in (1, 3, 5)] == [1, 3, 3]
