"""Processes meet on the bus: the namespace itself, and c10d on top of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch.distributed as dist

from bus.connection import Bus
from bus.messaging import rendezvous
from bus.messaging.rendezvous import Rendezvous
from bus.nats import jetstream
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind
from schemas.errors import DeadlineExceeded
from tests.conftest import Connect
from tests.patience import PATIENCE_S
from workers.transport.bus_store import BusStore


async def test_get_waits_for_a_key_that_another_writes(connect: Connect) -> None:
    here, there = Rendezvous(await connect("one"), "meet"), Rendezvous(await connect("two"), "meet")
    waiting = asyncio.create_task(here.get("a key/with any: text", timeout_s=PATIENCE_S))
    await there.wait([], timeout_s=1)
    await there.set("a key/with any: text", b"\x00value")
    assert await waiting == b"\x00value"
    assert await here.get("a key/with any: text", timeout_s=0) == b"\x00value"


async def test_a_key_that_nobody_writes_is_one_clear_error(connect: Connect) -> None:
    meet = Rendezvous(await connect("one"), "meet")
    with pytest.raises(
        DeadlineExceeded, match=r"nobody wrote rendezvous key 'never' of 'meet' within 0\.2 s"
    ):
        await meet.get("never", timeout_s=0.2)


async def test_namespaces_do_not_see_each_other(connect: Connect) -> None:
    bus = await connect("one")
    one, other = Rendezvous(bus, "one"), Rendezvous(bus, "other")
    await one.set("key", b"1")
    await one.add("count", 1)
    assert await one.keys() == ["count", "key"]
    assert await one.num_keys() == 2
    assert await other.num_keys() == 0
    assert not await other.check(["key"])


async def test_add_counts_exactly_with_many_writers(connect: Connect) -> None:
    buses = [await connect(f"writer-{number}") for number in range(4)]
    meets = [Rendezvous(bus, "count") for bus in buses for _ in range(4)]
    values = await asyncio.gather(*(meet.add("n", 1) for meet in meets for _ in range(10)))
    assert sorted(values) == list(range(1, 161))
    assert await meets[0].add("n", -60) == 100
    assert await meets[0].get("n", timeout_s=0) == b"100"


async def test_compare_set_append_delete(connect: Connect) -> None:
    meet = Rendezvous(await connect("one"), "cas")
    assert await meet.compare_set("k", b"", b"first") == b"first"
    assert await meet.compare_set("k", b"", b"second") == b"first"
    assert await meet.compare_set("k", b"first", b"second") == b"second"
    assert await meet.compare_set("absent", b"guess", b"new") == b"guess"
    assert not await meet.check(["absent"])
    winners = await asyncio.gather(*(meet.compare_set("race", b"", b"%d" % n) for n in range(8)))
    assert len(set(winners)) == 1
    await asyncio.gather(*(meet.append("list", b"%d" % n) for n in range(8)))
    assert sorted(await meet.get("list", timeout_s=0)) == sorted(b"01234567")
    assert await meet.delete("k")
    assert not await meet.delete("k")
    assert not await meet.check(["k"])


async def test_forget_takes_back_only_what_was_written_then(connect: Connect) -> None:
    meet = Rendezvous(await connect("one"), "forget")
    first = await meet.set("k", b"1")
    await meet.forget("k", first)
    assert not await meet.check(["k"])
    old = await meet.set("k", b"2")
    await meet.set("k", b"3")
    await meet.forget("k", old)
    assert await meet.get("k", timeout_s=0) == b"3"


async def test_it_makes_its_streams_and_makes_them_again_after_a_restart(own_server: EmbeddedServer) -> None:
    async with Bus.connect(own_server.url, name="one", kind=EntityKind.INSTANCE) as bus:
        await asyncio.gather(*(rendezvous.ensure(bus) for _ in range(4)))
        meet = Rendezvous(bus, "meet")
        await meet.set("k", b"1")
        back = asyncio.Event()

        async def reconnected() -> None:
            back.set()

        bus.on_reconnect(reconnected)
        await own_server.stop()
        await own_server.start()
        await asyncio.wait_for(back.wait(), PATIENCE_S)
        assert not await meet.check(["k"])  # it lived in memory
        await meet.set("k", b"2")
        assert await meet.add("n", 3) == 3
        assert await meet.get("k", timeout_s=PATIENCE_S) == b"2"


async def test_it_makes_its_streams_again_whatever_asks_first(own_server: EmbeddedServer) -> None:
    async with Bus.connect(own_server.url, name="one", kind=EntityKind.INSTANCE) as bus:
        await rendezvous.ensure(bus)
        meet = Rendezvous(bus, "meet")
        for ask in (lambda: meet.check(["k"]), lambda: meet.keys(), lambda: meet.delete("k")):
            await jetstream.call(bus.connection, "STREAM.DELETE.KV_rendezvous")
            assert not await ask()
        await jetstream.call(bus.connection, "STREAM.DELETE.KV_rendezvous")
        await meet.set("k", b"1")
        assert await meet.get("k", timeout_s=0) == b"1"


async def test_c10d_sees_a_store(connect: Connect) -> None:
    """Every call that c10d makes of a store, from a thread that is not the loop's, through a PrefixStore."""
    store = BusStore(
        Rendezvous(await connect("one"), "c10d"), asyncio.get_running_loop(), timedelta(seconds=2)
    )

    def use() -> None:
        inner = dist.PrefixStore("p", store)
        inner.set("a", "1")
        assert inner.get("a") == b"1"
        assert inner.add("n", 2) == 2
        assert inner.add("n", 3) == 5
        assert inner.check(["a", "n"])
        assert not inner.check(["a", "missing"])
        assert inner.compare_set("a", "1", "2") == b"2"
        inner.append("a", "3")
        assert inner.get("a") == b"23"
        inner.multi_set(["x", "y"], ["7", "8"])
        assert inner.multi_get(["x", "y"]) == [b"7", b"8"]
        inner.wait(["x", "y"])
        assert inner.delete_key("x")
        assert inner.num_keys() == 3
        store.set_timeout(timedelta(seconds=0.2))
        assert store.timeout == timedelta(seconds=0.2)
        assert store.clone().get("p/a") == b"23"
        with pytest.raises(dist.DistStoreError, match="nobody wrote"):
            store.get("missing")
        with pytest.raises(dist.DistStoreError, match="nobody wrote"):
            store.wait(["missing"], timedelta(seconds=0.1))

    await asyncio.to_thread(use)


async def test_a_store_refuses_the_loops_own_thread(connect: Connect) -> None:
    store = BusStore(Rendezvous(await connect("one"), "c10d"), asyncio.get_running_loop())
    with pytest.raises(RuntimeError, match="event loop's thread"):
        store.set("a", "1")


async def test_release_frees_a_thread_that_waits_in_a_store(connect: Connect) -> None:
    store = BusStore(
        Rendezvous(await connect("one"), "c10d"), asyncio.get_running_loop(), timedelta(seconds=30)
    )
    waiting = asyncio.create_task(asyncio.to_thread(store.get, "never"))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done  # it does wait
    store.release()
    with pytest.raises(dist.DistStoreError, match="released"):
        await waiting
    with pytest.raises(dist.DistStoreError, match="released"):
        await asyncio.to_thread(store.set, "a", "1")
