"""`hf://` by a hub on loopback: one commit, whatever happens to its branch meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from schemas.errors import BadData
from tests.builders.hub_server import HubServer, hub_server
from workers.data.storage.node_cache import open_storage
from workers.data.storage.range_reader import Storage, StorageConfig
from workers.data.storage.source_kinds import open_source

pytest.importorskip("huggingface_hub", reason="it comes with the extra `data`, which is not installed")
DATA = random.Random(2).randbytes(30_000)
CONFIG = StorageConfig(block_bytes=4096)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants
    from huggingface_hub.hf_file_system import HfFileSystem

    with hub_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            running.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        HfFileSystem.clear_instance_cache()
        yield running
        HfFileSystem.clear_instance_cache()


def test_ranges_are_of_the_commit_that_the_branch_named_at_first(hub: HubServer) -> None:
    first = hub.commit({"part/x.bin": DATA})
    storage = Storage(open_source("hf://datasets/org/name/part"), None, CONFIG)
    assert storage.names() == ["x.bin"]
    reader = storage.open("x.bin")
    assert (reader.size, reader.state.mark) == (len(DATA), first)
    assert reader.read(5000, 10_000) == DATA[5000:15_000]
    hub.commit({"part/x.bin": DATA[::-1]})
    assert reader.read(20_000, 9999) == DATA[20_000:29_999]
    newer = Storage(open_source("hf://datasets/org/name/part"), None, CONFIG).open("x.bin")
    assert newer.state.mark != first
    assert newer.read(0, 100) == DATA[::-1][:100]


def test_what_is_not_there_is_named(hub: HubServer) -> None:
    hub.commit({"x.bin": DATA})
    with pytest.raises(BadData, match="hf://datasets/org/other can't be read: "):
        open_storage("hf://datasets/org/other")
    with pytest.raises(BadData, match=r"name/y\.bin can't be read: it does not exist"):
        Storage(open_source("hf://datasets/org/name"), None, CONFIG).open("y.bin")
