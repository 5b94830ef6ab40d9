"""The node's cache as a folder: what is kept by whom, and what a killed process leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from workers.data.storage.block_cache import BlockCache, BlockCacheConfig
from workers.data.storage.block_file import block_key, file_bytes
from workers.data.storage.cache_plan import UNKNOWN
from workers.data.storage.needs import PublishedNeeds

SIZE = 1000
CONFIG = BlockCacheConfig(free_bytes=0, publish_s=0.0)
KEYS = [block_key("x", "e", 1, 1, number) for number in range(12)]
DATA = bytes(SIZE)


def cache_of(folder: Path, blocks: int, config: BlockCacheConfig = CONFIG) -> BlockCache:
    return BlockCache(folder, config=config, limit_bytes=blocks * file_bytes(SIZE))


def kept(cache: BlockCache) -> list[int]:
    return [number for number, key in enumerate(KEYS) if cache.holds(key)]


def test_what_is_needed_last_goes(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 3)
    uses = dict(zip(KEYS, [9.0, 2.0, 7.0, 5.0, 8.0], strict=False))
    cache.follow(lambda: uses)
    for number in range(5):
        cache.keep(KEYS[number], DATA, uses[KEYS[number]])
    assert kept(cache) == [1, 2, 3]
    assert cache.counts.declined == 1


def test_what_another_reader_needs_sooner_stays(tmp_path: Path) -> None:
    mine, other = cache_of(tmp_path, 2), PublishedNeeds(tmp_path / "readers", "other")
    other.publish({KEYS[0]: 1.0}, time.time())
    mine.follow(lambda: {KEYS[0]: 100.0, KEYS[1]: 50.0, KEYS[2]: 20.0})
    for number in range(3):
        mine.keep(KEYS[number], DATA, [100.0, 50.0, 20.0][number])
    assert kept(mine) == [0, 2]
    other.close()
    mine.keep(KEYS[3], DATA, 10.0)
    assert kept(mine) == [2, 3], "without the other reader its need is gone"


def test_needs_of_a_reader_that_died_do_not_count(tmp_path: Path) -> None:
    mine, dead = PublishedNeeds(tmp_path, "mine"), PublishedNeeds(tmp_path, "dead")
    dead.publish({KEYS[0]: 5.0}, now=100.0)
    assert mine.of_others(now=102.0) == {KEYS[0]: pytest.approx(3.0)}
    assert mine.of_others(now=300.0) == {KEYS[0]: 0.0}
    os.close(dead._file)  # as the end of its process does
    assert mine.of_others(now=102.0) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_published_file_of_garbage_is_ignored(tmp_path: Path) -> None:
    mine, other = PublishedNeeds(tmp_path, "mine"), PublishedNeeds(tmp_path, "other")
    other.publish({}, now=1.0)
    for content in (b"", b"\xff" * 100, b'{"written_at": "x"}\n', b'{"written_at": 1e999}\nabc', b"[]\n"):
        os.ftruncate(other._file, 0)
        os.pwrite(other._file, content, 0)
        mine.of_others(now=2.0)


def test_without_an_order_the_oldest_goes(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 2)
    for number in range(4):
        cache.keep(KEYS[number], DATA)
        path = tmp_path / "blocks" / KEYS[number][0] / KEYS[number]
        os.utime(path, (number, number))
    assert kept(cache) == [2, 3]


def test_a_full_disk_makes_the_cache_smaller_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tmp_path, 8)
    for number in range(4):
        assert cache.keep(KEYS[number], DATA)
    write: Callable[[str, str], None] = os.replace

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with structlog.testing.capture_logs() as logs:
        assert not any(cache.keep(KEYS[number], DATA, 1.0) for number in (4, 5))
    assert [entry["event"] for entry in logs] == ["the disk of cached data is full: the cache stays smaller"]
    monkeypatch.setattr(os, "replace", write)
    assert cache.keep(KEYS[6], DATA, 1.0)
    assert len(kept(cache)) <= 4


def test_disk_that_others_need_is_given_back(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 8)
    for number in range(4):
        cache.keep(KEYS[number], DATA)
    disk = os.statvfs(tmp_path)
    greedy = BlockCacheConfig(free_bytes=disk.f_bavail * disk.f_frsize + (1 << 40))
    assert not cache_of(tmp_path, 8, greedy).keep(KEYS[5], DATA)
    assert kept(cache) == []


def test_what_a_killed_writer_left_is_removed_and_usage_counted_anew(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 2)
    cache.keep(KEYS[0], DATA)
    partial = tmp_path / "blocks" / KEYS[0][0] / ".abcdef"
    partial.write_bytes(DATA)
    os.utime(partial, (1, 1))
    (tmp_path / "usage").write_bytes(b"torn")
    again = cache_of(tmp_path, 2)
    assert again.keep(KEYS[1], DATA)
    assert not partial.exists()
    assert kept(again) == [0, 1]


def test_a_process_that_was_frozen_with_the_lock_hinders_nobody(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 3, BlockCacheConfig(free_bytes=0, lock_wait_s=0.01))
    cache.keep(KEYS[0], DATA)
    frozen = os.open(tmp_path / "usage", os.O_RDWR)
    fcntl.flock(frozen, fcntl.LOCK_EX)
    assert not cache.keep(KEYS[1], DATA, 1.0)
    assert cache.read(KEYS[0], 0, SIZE, SIZE) == DATA
    os.close(frozen)
    assert cache.keep(KEYS[1], DATA, 1.0)


def test_a_block_just_fetched_by_another_reader_does_not_go_before_it_has_said_why(tmp_path: Path) -> None:
    first, second = cache_of(tmp_path, 1), cache_of(tmp_path, 1, BlockCacheConfig(free_bytes=0))
    first.keep(KEYS[0], DATA)
    assert not second.keep(KEYS[1], DATA, UNKNOWN)
    assert kept(first) == [0]
