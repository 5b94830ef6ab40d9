"""Ranges of files: the same bytes from memory, cache and store, and never a wrong one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from schemas.errors import BadData, Unavailable
from tests.builders.range_server import RangeServer, range_server
from tests.patience import NEVER_S
from workers.data.storage.block_cache import BlockCache, BlockCacheConfig
from workers.data.storage.range_reader import Storage, StorageConfig
from workers.data.storage.retrying import SourceChanged, StoreRetryTimes
from workers.data.storage.source_kinds import open_source

BLOCK = 4096
SOON = StoreRetryTimes(first_s=0.001, longest_s=0.001, give_up_s=30)
CONFIG = StorageConfig(block_bytes=BLOCK, memory_bytes=0, retries=SOON, first_retries=SOON)
DATA = random.Random(3).randbytes(10 * BLOCK + 77)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with range_server() as running:
        running.files["x.bin"] = DATA
        yield running


def storage_of(url: str, cache: Path | None = None, *, limit: int = 1 << 30) -> Storage:
    blocks = None
    if cache is not None:
        blocks = BlockCache(cache, config=BlockCacheConfig(free_bytes=0), limit_bytes=limit)
    return Storage(open_source(url), blocks, CONFIG)


def random_ranges(count: int = 40) -> list[tuple[int, int]]:
    draw = random.Random(9)
    return [(draw.randrange(len(DATA)), draw.randrange(1, 3 * BLOCK)) for _ in range(count)]


def test_any_range_is_right_cold_and_cached_and_after_a_restart(server: RangeServer, tmp_path: Path) -> None:
    for _ in range(2):
        storage = storage_of(server.url, tmp_path)
        reader = storage.open("x.bin")
        assert reader.size == len(DATA)
        for start, length in random_ranges():
            assert reader.read(start, length) == DATA[start : start + length]
        storage.close()
    fetched = server.data_requests()
    assert len(fetched) == len(set(fetched)) == reader.blocks, "each block was fetched once in all"


@pytest.mark.parametrize("kind", ["local", "memory", "http"])
def test_it_reads_alike_from_everywhere(kind: str, server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(DATA)
    with fsspec.open("memory://ranges/x.bin", "wb") as file:
        file.write(DATA)
    url = {"local": str(tmp_path), "memory": "memory://ranges", "http": server.url}[kind]
    for base, name in ((url, "x.bin"), (f"{url}/x.bin", "")):
        reader = storage_of(base).open(name)
        for start, length in random_ranges(10):
            assert reader.read(start, length) == DATA[start : start + length]
        file = reader.as_file()
        file.seek(-100, 2)
        assert file.read() == DATA[-100:]


@pytest.mark.parametrize("kind", ["local", "memory", "http"])
def test_a_file_that_changes_stops_before_the_first_wrong_byte(
    kind: str, server: RangeServer, tmp_path: Path
) -> None:
    url = {"local": str(tmp_path), "memory": "memory://changing", "http": server.url}[kind]

    def write(data: bytes) -> None:
        if kind == "http":
            server.files["y.bin"] = data
        else:
            with fsspec.open(f"{url}/y.bin", "wb") as file:
                file.write(data)

    write(DATA)
    reader = storage_of(url).open("y.bin")
    assert reader.read(0, 10) == DATA[:10]
    write(DATA[::-1][:-5])
    with pytest.raises(SourceChanged, match=r"y\.bin has changed since it was opened.*a new name"):
        reader.read(5 * BLOCK, 10)


def test_a_file_that_grew_while_a_job_reads_it_has_changed_too(server: RangeServer) -> None:
    reader = storage_of(server.url).open("x.bin")
    server.files["x.bin"] = DATA + b"more"
    with pytest.raises(SourceChanged):
        reader.read(0, 10)


def test_blocks_of_another_state_of_the_file_are_never_given(server: RangeServer, tmp_path: Path) -> None:
    storage_of(server.url, tmp_path).open("x.bin").read(0, BLOCK)
    server.files["x.bin"] = changed = DATA[::-1]
    assert storage_of(server.url, tmp_path).open("x.bin").read(0, BLOCK) == changed[:BLOCK]


def test_a_file_whose_state_nobody_tells_is_not_kept_for_other_processes(
    server: RangeServer, tmp_path: Path
) -> None:
    server.etags = False
    for data in (DATA, DATA[::-1]):
        server.files["x.bin"] = data
        assert storage_of(server.url, tmp_path).open("x.bin").read(0, 2 * BLOCK) == data[: 2 * BLOCK]


def test_errors_that_pass_are_waited_for(server: RangeServer) -> None:
    server.failures = 7
    reader = storage_of(server.url).open("x.bin")
    server.failures = 7
    assert reader.read(BLOCK, 10) == DATA[BLOCK : BLOCK + 10]
    assert server.failures == 0


def test_a_store_that_stays_away_ends_in_an_error_that_others_may_retry(server: RangeServer) -> None:
    storage = storage_of(server.url)
    short = StoreRetryTimes(first_s=0.001, longest_s=0.001, give_up_s=0.01)
    storage.config = replace(CONFIG, retries=short)
    reader = storage.open("x.bin")
    server.failures = 10**6
    with pytest.raises(Unavailable, match=r"x\.bin could not be read for"):
        reader.read(0, 1)


def test_a_store_that_has_never_answered_is_given_up_sooner(server: RangeServer) -> None:
    storage = storage_of(server.url)
    short = StoreRetryTimes(first_s=0.001, longest_s=0.001, give_up_s=0.01)
    storage.config = replace(CONFIG, first_retries=short, retries=StoreRetryTimes(give_up_s=NEVER_S))
    server.failures = 10**6
    with pytest.raises(Unavailable, match=r"x\.bin could not be read for"):
        storage.open("x.bin")


@pytest.mark.parametrize(
    ("name", "text"),
    [("gone.bin", "it does not exist"), ("../x", "not the name of a file"), ("/etc/passwd", "not the name")],
)
def test_a_name_that_is_none_is_refused(name: str, text: str, server: RangeServer, tmp_path: Path) -> None:
    for url in (server.url, str(tmp_path), "memory://none"):
        with pytest.raises(BadData, match=text):
            storage_of(url).open(name)


def test_a_server_without_ranges_is_named(server: RangeServer) -> None:
    server.ranges = False
    with pytest.raises(BadData, match=r"x\.bin: the server answers no range requests"):
        storage_of(server.url).open("x.bin")


def test_an_empty_file_is_read(server: RangeServer, tmp_path: Path) -> None:
    server.files["empty"] = b""
    (tmp_path / "empty").touch()
    for url in (server.url, str(tmp_path)):
        assert storage_of(url).open("empty").read(0, 10) == b""


def test_a_damaged_block_is_fetched_again(server: RangeServer, tmp_path: Path) -> None:
    storage_of(server.url, tmp_path).open("x.bin").read(0, len(DATA))
    blocks = sorted((tmp_path / "blocks").glob("?/*"))
    for number, block in enumerate(blocks):
        content = bytearray(block.read_bytes())
        content[-1 - number] ^= 4
        block.write_bytes(content if number % 2 else content[:-3])
    storage = storage_of(server.url, tmp_path)
    assert storage.open("x.bin").read(0, len(DATA)) == DATA
    assert storage.cache is not None
    assert storage.cache.counts.damaged == len(blocks)
    again = storage_of(server.url, tmp_path)
    assert again.open("x.bin").read(0, len(DATA)) == DATA
    assert again.counts.fetched_bytes == 0


def test_many_readers_of_a_node_fetch_each_block_once(server: RangeServer, tmp_path: Path) -> None:
    storages = [storage_of(server.url, tmp_path) for _ in range(6)]
    readers = [storage.open("x.bin") for storage in storages]
    server.gate.clear()
    with ThreadPoolExecutor(len(readers)) as threads:
        found = [threads.submit(reader.read, 0, len(DATA)) for reader in readers]
        server.gate.set()
        assert all(future.result() == DATA for future in found)
    assert len(server.data_requests()) == readers[0].blocks


def test_no_more_is_kept_than_may_be(server: RangeServer, tmp_path: Path) -> None:
    limit = 3 * (BLOCK + 200)
    storage = storage_of(server.url, tmp_path, limit=limit)
    reader = storage.open("x.bin")
    for start, length in random_ranges():
        assert reader.read(start, length) == DATA[start : start + length]
        kept = sum(path.stat().st_size for path in (tmp_path / "blocks").glob("?/*"))
        assert kept <= limit
    (tmp_path / "limit").write_text("0")
    assert reader.read(0, len(DATA)) == DATA
    assert not list((tmp_path / "blocks").glob("?/*")), "a limit that was lowered holds at once"


def test_a_disk_that_fails_costs_only_the_cache(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("in the way")
    reader = storage_of(server.url, tmp_path).open("x.bin")
    assert reader.read(0, len(DATA)) == DATA


def test_blocks_in_memory_are_bounded_and_spare_requests(server: RangeServer) -> None:
    storage = Storage(open_source(server.url), None, replace(CONFIG, memory_bytes=2 * BLOCK))
    reader = storage.open("x.bin")
    for _ in range(3):
        assert reader.read(10, 20) == DATA[10:30]
    assert len(server.data_requests()) == 1
    reader.read(0, len(DATA))
    reader.read(10, 20)
    assert len(server.data_requests()) == 1 + (reader.blocks - 1) + 1


def test_a_reader_that_waits_for_one_that_hangs_fetches_in_the_end_itself(
    server: RangeServer, tmp_path: Path
) -> None:
    config = BlockCacheConfig(free_bytes=0, fetch_wait_s=0.05)
    cache = BlockCache(tmp_path, config=config, limit_bytes=1 << 30)
    reader = Storage(open_source(server.url), cache, CONFIG).open("x.bin")
    hangs, ends = threading.Event(), threading.Event()

    def hang() -> None:
        with cache.fetching(reader.key(0)):
            hangs.set()
            ends.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    hangs.wait()
    assert reader.read(0, 10) == DATA[:10]
    ends.set()
    thread.join()
