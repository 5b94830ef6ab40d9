"""A source is streamed in bounded memory and on a bounded part of the disk, however large it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.builders.range_server import range_server
from tests.builders.shards import mds_files
from workers.data.shards.mds import MdsShards
from workers.data.shards.shard_samples import ShardSamples
from workers.data.storage.block_cache import BlockCache, BlockCacheConfig
from workers.data.storage.range_reader import Storage, StorageConfig
from workers.data.storage.read_ahead import ReadAheadConfig
from workers.data.storage.source_kinds import open_source

BLOCK, SAMPLE, SHARDS, PER_SHARD = 16 << 10, 4 << 10, 8, 24
MEMORY, AHEAD, DISK, THREADS = 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 2
SOURCE = SHARDS * PER_SHARD * SAMPLE


def test_memory_and_disk_stay_within_their_bounds(tmp_path: Path) -> None:
    rows = [
        [{"x": np.full(SAMPLE, number, np.uint8)} for number in range(shard, shard + PER_SHARD)]
        for shard in range(SHARDS)
    ]
    with range_server() as server:
        server.files |= mds_files({"x": f"ndarray:uint8:{SAMPLE}"}, rows)
        cache = BlockCache(tmp_path, config=BlockCacheConfig(free_bytes=0), limit_bytes=DISK)
        config = StorageConfig(block_bytes=BLOCK, memory_bytes=MEMORY)
        storage = Storage(open_source(server.url), cache, config)
        ahead = ReadAheadConfig(threads=THREADS, most_bytes=AHEAD)
        samples = ShardSamples(MdsShards(storage, "data"), storage, ahead=ahead)
        order = np.random.default_rng(0).permutation(len(samples)).tolist()
        most_held = most_kept = 0
        for batch in (order[start : start + 16] for start in range(0, len(order), 16)):
            samples.expect(batch)
            for index in batch:
                shard, number = divmod(index, PER_SHARD)
                assert int(samples[index]["x"][0]) == shard + number
                most_held = max(most_held, samples.held_bytes)
            kept = sum(path.stat().st_size for path in tmp_path.glob("blocks/?/*"))
            most_kept = max(most_kept, kept)
        samples.close()
    assert SOURCE >= 10 * DISK, "the source is much larger than what may be kept of it"
    assert 0 < most_held <= MEMORY + AHEAD + THREADS * SAMPLE
    assert 0 < most_kept <= DISK + (THREADS + 1) * 2 * BLOCK, "blocks that are being written come on top"
    assert not samples.held_bytes - storage.memory.held_bytes, "all that was read ahead was taken"
