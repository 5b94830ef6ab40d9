"""Keys and values under a budget, and rows that are kept for a neighbour."""

from __future__ import annotations

import pytest
import torch

from workers.serving.kv_cache import AttentionSite, KvCache
from workers.serving.retained_rows import RetainedRows

SITES = (AttentionSite("block_0", 2, 8, 4), AttentionSite("block_1", 2, 8, 4))
BLOCK = 64 * 2 * 2 * 12 * 4


def test_admission_sees_blocks_and_a_session_is_reserved_as_a_whole() -> None:
    cache = KvCache(SITES, 10 * BLOCK + 5)
    assert (cache.block_bytes, cache.blocks, cache.blocks_of(65)) == (BLOCK, 10, 2)
    assert cache.reserve("a", 64 * 6)
    assert not cache.reserve("b", 64 * 4 + 1)
    assert cache.free_blocks == 4
    assert cache.reserve("b", 64 * 4)
    assert not cache.reserve("a", 64 * 7)
    assert cache.reserve("a", 5)  # what it has is enough
    cache.drop("b")
    cache.drop("b")
    assert cache.free_blocks == 4
    assert cache.used_bytes == 0


def test_memory_is_taken_as_rows_come_and_stays_within_what_was_reserved() -> None:
    cache = KvCache(SITES, 10 * BLOCK)
    cache.reserve("a", 64 * 5)
    keys, values = cache.room("a", 3)[1]
    assert (keys.shape, values.shape) == ((2, 64, 8), (2, 64, 4))
    keys[:, :3] = 7
    cache.wrote("a", 0, 3)
    for tokens, blocks in ((64, 1), (65, 2), (129, 4), (300, 5)):
        keys = cache.room("a", tokens)[1][0]
        assert cache.used_bytes == blocks * BLOCK
    assert torch.equal(keys[:, :3], torch.full((2, 3, 8), 7.0))
    assert not keys[:, 3:].any()
    cache.truncate("a", 2)
    cache.truncate("unknown", 2)
    assert (cache.tokens("a"), cache.tokens("unknown")) == (2, 0)
    cache.drop("a")
    assert (cache.used_bytes, cache.tokens("a")) == (0, 0)


def test_a_stage_without_attention_is_never_full() -> None:
    cache = KvCache((), 0)
    assert cache.reserve("a", 1 << 20)
    assert cache.room("a", 5) == []


def test_rows_are_kept_replaced_and_counted() -> None:
    rows, kept = torch.arange(40.0).view(10, 4), RetainedRows()
    whole = torch.cat((rows, rows))
    kept.keep("a", 0, (whole[:6],))
    kept.keep("a", 6, (rows[6:8],))
    assert (kept.rows("a"), kept.bytes) == (8, 8 * 16)  # not the whole wave's memory
    assert torch.equal(kept.between("a", 2, 7)[0], rows[2:7])
    kept.keep("a", 5, (rows[:1],))  # the wave is repeated from there
    assert kept.rows("a") == 6
    assert torch.equal(kept.between("a", 4, 6)[0], torch.stack((rows[4], rows[0])))
    with pytest.raises(ValueError, match="rows 6 to 9 of session a were never kept"):
        kept.keep("a", 9, (rows,))
    with pytest.raises(KeyError, match="6 are kept"):
        kept.between("a", 0, 7)
    kept.truncate("a", 0)
    assert (kept.rows("a"), kept.bytes) == (0, 0)
