"""Shards at a store, read in a random order: what is fetched again; never anything but the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schemas.errors import BadData
from tests.builders.shards import mds_files
from workers.data.order import OrderedSource, SampleOrder
from workers.data.shards.mds import MdsShards
from workers.data.shards.shard_samples import ShardSamples
from workers.data.storage.block_cache import BlockCache, BlockCacheConfig
from workers.data.storage.block_file import file_bytes
from workers.data.storage.range_reader import Storage, StorageConfig
from workers.data.storage.sources import FileSource, FileState

SHARDS, PER_SHARD, WORDS, SEED = 160, 8, 250, 5
"""A sample has 1,000 bytes, a shard two blocks of 4 KiB; 8 of 160 shards are shuffled together."""
BLOCK = 4096
EPOCH = SHARDS * PER_SHARD


class CountedStore(FileSource):
    """A store in memory."""

    def __init__(self) -> None:
        super().__init__("memory://store")
        numbers = np.arange(EPOCH, dtype=np.int32).reshape(SHARDS, PER_SHARD)
        shards = [[{"x": np.full(WORDS, number, np.int32)} for number in shard.tolist()] for shard in numbers]
        self.files = mds_files({"x": f"ndarray:int32:{WORDS}"}, shards)
        self.sent_bytes = 0

    @property
    def bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def state(self, name: str) -> FileState:
        return FileState(len(self.files[name]), str(hash(self.files[name])))

    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        if state != self.state(name):
            raise self.changed(name)
        self.sent_bytes += length
        return self.files[name][start : start + length]

    def names(self) -> list[str]:
        return sorted(self.files)


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


def opened(store: CountedStore, cache: Path | None, part: float = 1.2) -> ShardSamples:
    limit = int(part * store.bytes * file_bytes(BLOCK) / BLOCK)
    config = BlockCacheConfig(free_bytes=0, renewed_part=0.02)
    blocks = None if cache is None else BlockCache(cache, config=config, limit_bytes=limit)
    storage = Storage(store, blocks, StorageConfig(block_bytes=BLOCK, memory_bytes=0))
    return ShardSamples(MdsShards(storage, "data"), storage)


def order_of(samples: ShardSamples, *, in_blocks: bool) -> SampleOrder:
    print(f"seed {SEED}")
    return SampleOrder(SEED, "train", [OrderedSource(EPOCH, samples.blocks if in_blocks else ())])


def fetched_per_epoch(
    store: CountedStore, cache: Path | None, part: float, *, in_blocks: bool, epochs: int = 3
) -> list[float]:
    """Bytes that the store sent in each epoch, as a part of the data."""
    samples = opened(store, cache, part)
    order = order_of(samples, in_blocks=in_blocks)
    samples.follow(lambda start, count: order.draws(start, count).indices)
    found = []
    for epoch in range(epochs):
        before = store.sent_bytes
        for position, index in enumerate(order.draws(epoch * EPOCH, EPOCH).indices.tolist()):
            samples.reached(epoch * EPOCH + position)
            assert int(samples[index]["x"][-1]) == index
        found.append((store.sent_bytes - before) / store.bytes)
    samples.close()
    print(f"cache {part:.0%}: {[round(each, 3) for each in found]}")
    return found


@pytest.mark.parametrize(("part", "bar"), [(0.25, 0.79), (0.5, 0.53), (0.75, 0.27)])
def test_after_the_first_epoch_little_more_is_fetched_than_what_does_not_fit(
    part: float, bar: float, store: CountedStore, tmp_path: Path
) -> None:
    found = fetched_per_epoch(store, tmp_path, part, in_blocks=True)
    assert sum(found[1:]) / len(found[1:]) <= bar


def test_with_room_for_all_each_byte_is_fetched_once_whoever_restarts(
    store: CountedStore, tmp_path: Path
) -> None:
    assert sum(fetched_per_epoch(store, tmp_path, 1.1, in_blocks=True, epochs=2)) < 1.05
    before = store.sent_bytes
    samples = opened(store, tmp_path)
    assert [int(samples[index]["x"][0]) for index in range(EPOCH)] == list(range(EPOCH))
    assert store.sent_bytes == before


def test_a_shard_that_changes_under_a_job_stops_it_before_a_wrong_sample(
    store: CountedStore, tmp_path: Path
) -> None:
    samples = opened(store, tmp_path)
    assert int(samples[0]["x"][0]) == 0
    name = "shard.00000.mds"
    before = store.files[name]
    try:
        store.files[name] = before[:-4] + b"\0\0\0\0"
        assert int(samples[0]["x"][-1]) == 0, "what was cached is what it was"
        with pytest.raises(BadData, match=r"shard\.00000\.mds has changed since it was opened"):
            samples[PER_SHARD - 1]
    finally:
        store.files[name] = before
