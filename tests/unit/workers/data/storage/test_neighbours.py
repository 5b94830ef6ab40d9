"""A block that another node keeps does not come from the store, and nobody's word is taken for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.builders.range_server import RangeServer, range_server
from workers.data.storage.block_cache import BlockCache, BlockCacheConfig
from workers.data.storage.neighbours import Neighbours
from workers.data.storage.range_reader import Storage, StorageConfig, StorageCounts
from workers.data.storage.source_kinds import open_source

BLOCK = 4096
DATA = random.Random(5).randbytes(6 * BLOCK + 9)


class Line:
    """A line to one other node's cache, whose answers a test may change."""

    def __init__(self, other: BlockCache) -> None:
        self.other = other
        self.refused: list[str] = []
        self.kept_keys: list[str] = []

    def ask(self, key: str, block_length: int) -> bytes | None:
        return None if self.refused else self.other.file_of(key, block_length)

    def refuse(self, key: str) -> None:
        self.refused.append(key)

    def kept(self, key: str) -> None:
        self.kept_keys.append(key)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with range_server() as running:
        running.files["x.bin"] = DATA
        yield running


def storage_of(server: RangeServer, folder: Path, neighbours: Neighbours | None = None) -> Storage:
    config = BlockCacheConfig(free_bytes=0)
    cache = BlockCache(folder, config=config, limit_bytes=1 << 30, neighbours=neighbours)
    return Storage(open_source(server.url), cache, StorageConfig(block_bytes=BLOCK, memory_bytes=0))


def connected(line: Line) -> Neighbours:
    neighbours = Neighbours()
    neighbours.connect(line)
    return neighbours


def read(storage: Storage) -> bytes:
    return storage.open("x.bin").read(0, len(DATA))


def test_a_second_node_fetches_nothing_of_what_the_first_keeps(server: RangeServer, tmp_path: Path) -> None:
    first = storage_of(server, tmp_path / "one")
    assert read(first) == DATA
    assert first.cache is not None
    requests, line = len(server.data_requests()), Line(first.cache)
    second = storage_of(server, tmp_path / "two", connected(line))
    assert read(second) == DATA
    assert len(server.data_requests()) == requests
    assert second.counts.fetched_bytes == 0
    assert second.cache is not None
    assert second.cache.counts.from_neighbours == 7
    assert sorted(line.kept_keys) == sorted(first.cache.keys()) == sorted(second.cache.keys())


def test_bytes_are_counted_by_where_they_came_from(server: RangeServer, tmp_path: Path) -> None:
    first = storage_of(server, tmp_path / "one")
    read(first)
    assert first.counts.bytes == {"store": len(DATA)}
    reader = first.open("x.bin")
    reader.read(5, 10)
    reader.read(BLOCK - 1, 2)
    assert first.counts.bytes == {"store": len(DATA), "disk": 12}
    assert first.cache is not None
    total = StorageCounts()
    line, config = Line(first.cache), StorageConfig(block_bytes=BLOCK)
    neighbours = connected(line)
    cache = BlockCache(tmp_path / "two", limit_bytes=0, neighbours=neighbours)  # keeps nothing
    second = Storage(open_source(server.url), cache, config, total=total)
    assert read(second) == read(second) == DATA
    assert second.counts.bytes == {"neighbour": len(DATA), "memory": len(DATA)}
    third = Storage(open_source(server.url), config=config, total=total)
    third.open("x.bin").read(0, 1)
    assert total.bytes == {"neighbour": len(DATA), "memory": len(DATA), "store": BLOCK}
    assert total.requests == 1
    with capture_logs() as lines:
        second.close()
        third.close()
    (told,) = [line for line in lines if line["event"] == "data read from a store"]
    assert (told["fetched_bytes"], told["requests"]) == (BLOCK, 1)


@pytest.mark.parametrize("how", ["a bit", "the head", "another block", "nothing", "more"])
def test_one_that_gives_other_bytes_is_noticed_and_not_asked_again(
    how: str, server: RangeServer, tmp_path: Path
) -> None:
    first = storage_of(server, tmp_path / "one")
    read(first)
    assert first.cache is not None
    blocks = sorted((tmp_path / "one" / "blocks").glob("?/*"))
    honest = [path.read_bytes() for path in blocks]
    for path, content, other in zip(blocks, honest, [*honest[1:], honest[0]], strict=True):
        lie = bytearray(content)
        lie[-1 if how == "a bit" else 20] ^= 1
        told = {"another block": other, "nothing": b"", "more": content + b"x"}.get(how, bytes(lie))
        path.write_bytes(told)

    class Liar(Line):
        def ask(self, key: str, block_length: int) -> bytes | None:
            path = tmp_path / "one" / "blocks" / key[0] / key
            return None if self.refused else path.read_bytes()

    line = Liar(first.cache)
    second = storage_of(server, tmp_path / "two", connected(line))
    with capture_logs() as lines:
        assert read(second) == DATA
    assert second.counts.fetched_bytes == len(DATA)
    assert len(line.refused) == 1
    assert [each["event"] for each in lines if each["log_level"] == "warning"] == [
        "another node's cache gave a damaged block: it comes from the store"
    ]


def test_what_no_neighbour_has_comes_from_the_store(server: RangeServer, tmp_path: Path) -> None:
    empty = BlockCache(tmp_path / "one", limit_bytes=1 << 30)
    second = storage_of(server, tmp_path / "two", connected(Line(empty)))
    assert read(second) == DATA
    assert second.counts.fetched_bytes == len(DATA)
