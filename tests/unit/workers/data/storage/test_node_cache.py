"""Files that other kinds of data open are read by ranges, too, and kept on the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet
from structlog.testing import capture_logs

from workers.data.source_files import list_files
from workers.data.storage import node_cache
from workers.data.storage.retrying import SourceChanged


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    node_cache.grant(tmp_path / "cache", "reader")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "limit").write_text(str(1 << 30))
    yield tmp_path / "cache"
    node_cache.grant(None, "")


def test_a_table_at_a_store_is_read_by_ranges_and_kept(cache: Path) -> None:
    store = fsspec.filesystem("memory")
    with store.open("/tables/x.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"a": list(range(1000))}), file)
    (listed,) = list_files("memory://tables/x.parquet")
    with listed.open() as opened:
        assert parquet.read_table(opened)["a"].to_pylist() == list(range(1000))
    assert len(list((cache / "blocks").glob("?/*"))) == 1
    assert node_cache.shared_folder() == cache


def test_each_of_many_files_is_kept_without_a_line_of_its_own(cache: Path) -> None:
    store = fsspec.filesystem("memory")
    for number in range(5):
        store.pipe_file(f"/pictures/{number}", bytes([number]) * 10)
    with capture_logs() as lines:
        for listed in list_files("memory://pictures"):
            with listed.open() as opened:
                assert opened.read() == bytes([int(listed.name)]) * 10
    assert len(list((cache / "blocks").glob("?/*"))) == 5
    assert not lines
    assert not list((cache / "readers").iterdir())


def test_one_that_changes_while_it_is_open_is_told(cache: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/texts/x.txt", b"a" * (9 << 20))
    (listed,) = list_files("memory://texts/x.txt")
    with listed.open() as opened:
        assert opened.read(10) == b"a" * 10
        store.pipe_file("/texts/x.txt", b"b" * (8 << 20))
        opened.seek(8 << 20)
        with pytest.raises(SourceChanged):
            opened.read(10)
