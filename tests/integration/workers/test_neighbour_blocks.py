"""Blocks of the cache on their way between two nodes' data instances, over a real bus and real links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bus.connection import Bus
from bus.subjects import BLOCK_SEND
from schemas.data_blocks import BlockSend
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.errors import NotFound
from schemas.step import Member
from tests.conftest import Connect
from tests.integration.workers.exchanging import CONFIG
from tests.patience import PATIENCE_S
from workers.data.storage.block_cache import BlockCache, BlockCacheConfig
from workers.data.storage.block_file import block_key, unpacked
from workers.links.hop_exchange import HopExchange
from workers.stage.neighbour_blocks import NeighbourBlocks, NeighbourConfig

BUILD_S = 20.0
"""Limit of a link's build: one that is under way when a test ends is waited for."""
TIMES = NeighbourConfig(wait_s=PATIENCE_S, tell_s=0.02)
DATA = bytes(range(256)) * 300
KEY, OTHER = (block_key("x", "etag", 1 << 20, 1 << 16, number) for number in range(2))


class Node:
    """A data instance's part of it, with a cache of its own."""

    def __init__(self, bus: Bus, sid: str, node: str, folder: Path) -> None:
        member = Member(sid=sid, incarnation="1")
        self.bus, self.member, self.folder = bus, member, folder
        self.cache = BlockCache(folder, config=BlockCacheConfig(free_bytes=0), limit_bytes=1 << 30)
        self.offers: asyncio.Queue[MicrobatchNotice] = asyncio.Queue()
        self.exchange = HopExchange(
            bus,
            member=member,
            job="job",
            epoch=1,
            decide=self._decide,
            received=lambda notice, tensors: self.line.received(notice, tensors),
            config=replace(CONFIG, build_timeout_s=BUILD_S),
        )
        self.line = NeighbourBlocks(
            bus, job="job", member=member, node=node, cache=self.cache, send=self.exchange.send, config=TIMES
        )

    def _decide(self, notice: MicrobatchNotice) -> str:
        self.offers.put_nowait(notice)
        return self.line.offered(notice)

    async def ask(self, key: str, length: int = len(DATA)) -> bytes | None:
        return await asyncio.to_thread(self.line.ask, key, length)

    async def until_known(self, key: str) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.ask(key)) is None:
                pass
        return found


@pytest.fixture
async def nodes(connect: Connect, tmp_path: Path) -> AsyncIterator[list[Node]]:
    @asynccontextmanager
    async def opened(sid: str, node: str) -> AsyncIterator[Node]:
        bus = await connect(sid, EntityKind.INSTANCE)
        made = Node(bus, sid, node, tmp_path / node)
        async with made.exchange:
            yield made
            await made.line.close()

    async with opened("one", "a") as one, opened("two", "b") as two, opened("three", "b") as three:
        one.cache.keep(KEY, DATA)
        for each in (one, two, three):
            await each.line.open()
        yield [one, two, three]


async def test_a_block_comes_from_the_node_that_keeps_it(nodes: list[Node]) -> None:
    one, two, three = nodes
    assert unpacked(await two.until_known(KEY), KEY, len(DATA)) == DATA
    assert await two.ask(OTHER) is None, "nobody has told of it, so nobody is asked"
    one.cache.keep(OTHER, DATA)
    one.line.kept(OTHER)
    assert unpacked(await three.until_known(OTHER), OTHER, len(DATA)) == DATA
    assert three.offers.qsize() == 1, "its own node shares a folder"


async def test_what_has_gone_is_not_waited_for_and_one_who_lied_is_not_asked(nodes: list[Node]) -> None:
    one, two, three = nodes
    await two.until_known(KEY)
    await three.until_known(KEY)
    three.line.refuse(KEY)
    assert await three.ask(KEY) is None
    for path in one.folder.glob("blocks/?/*"):
        path.unlink()
    assert await two.ask(KEY) is None
    order = BlockSend(job="job", key=KEY, bytes=len(DATA), to=two.member, transfer=9)
    with pytest.raises(NotFound):
        await two.bus.request(BLOCK_SEND, order, job="job", sid="one")


async def test_nothing_is_taken_that_was_not_asked_for(nodes: list[Node]) -> None:
    _, two, three = nodes
    order = BlockSend(job="job", key=KEY, bytes=len(DATA), to=two.member, transfer=9)
    await three.bus.request(BLOCK_SEND, order, job="job", sid="one")
    offer = await asyncio.wait_for(two.offers.get(), PATIENCE_S)
    assert two.line.offered(offer) == "stale"
