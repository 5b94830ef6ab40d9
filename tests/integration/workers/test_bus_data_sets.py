"""Data sets whose files lie on the bus: built there by units, and fetched by jobs once per node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.connection import Bus
from bus.files.artifacts import Artifacts, open_artifacts
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.manifest import DataSetManifest
from schemas.errors import BadData, Unavailable
from schemas.job_file.data_set_use import DataSetUse
from tests.builders.data_sets import LocalBuild, made_up_texts, write_lines
from tests.builders.samples import data_job
from tests.conftest import Connect
from workers.data.batches import BatchSource
from workers.data.opening import open_source
from workers.data.storage import node_cache
from workers.data_builds.stores import ArtifactUnitStore

STORE = "bus://built/corpus/w0"


class BusDataSet:
    """A data set on the bus."""

    def __init__(self, bus: Bus, manifest: DataSetManifest) -> None:
        self.bus = bus
        self.manifest = manifest
        self.files: Artifacts = open_artifacts(STORE, bus)

    async def open(self) -> BatchSource:
        use = DataSetUse(
            name="corpus",
            version=3,
            digest=self.manifest.digest,
            manifest="bus://built/corpus/manifests/3.json",
            store=STORE,
        )
        section: dict[str, Any] = {
            "kind": "dataset",
            "source": "dataset://corpus",
            "data_set": use.model_dump(),
        }
        return await open_source(data_job({**section, "sample_tokens": 48}), self.bus)


@pytest.fixture
async def built(connect: Connect, tmp_path: Path) -> BusDataSet:
    bus = await connect("builder")
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in made_up_texts(60, seed=5)])
    spec = DataBuildSpec.model_validate(
        {
            "name": "corpus",
            "source": str(corpus),
            "unit_bytes": 2048,
            "group_units": 2,
            "validation_fraction": 0.2,
            "steps": [
                {"function": "near_duplicates"},
                {"function": "tokenize", "tokenizer": "bytes"},
                {"function": "pack", "args": {"sample_tokens": 48}},
            ],
        }
    )
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    store = ArtifactUnitStore(open_artifacts(STORE, bus), fetched, asyncio.get_running_loop())
    done = await asyncio.to_thread(LocalBuild, store, spec, seed=1, attempts=2)
    manifest = DataSetManifest(**done.content.model_dump(), version=3, built_at=1.0, store=STORE)
    document = manifest.model_dump_json().encode()
    await open_artifacts("bus://built/corpus/manifests", bus).put_bytes("3.json", document)
    return BusDataSet(bus, manifest)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    folder.mkdir()
    node_cache.grant(folder, "test")
    yield folder
    node_cache.grant(None, "test")


async def test_windows_from_the_bus(built: BusDataSet) -> None:
    source = await built.open()
    for split in ("train", "validation"):
        assert source.size(split) == built.manifest.rows(split) > 0
        assert source.batch(split, 0, 0)["inputs"].shape[1] == 48
    source.close()


async def test_a_node_fetches_each_file_once(built: BusDataSet, cache: Path) -> None:
    first = await built.open()
    expected = first.batch("train", 0, 0)
    first.close()
    stored = built.manifest.splits["train"][0]
    for shards in built.manifest.splits.values():
        for shard in shards:
            await built.files.delete(shard.name)  # nobody needs the bus's own any more
            await built.files.delete(shard.index.name)
    second = await built.open()
    assert (second.batch("train", 0, 0)["inputs"] == expected["inputs"]).all()
    second.close()
    (cache / "data_sets" / stored.name).unlink()
    with pytest.raises(BadData, match=f"{stored.name} is not on the bus any more; build it again"):
        await built.open()


async def test_a_file_that_was_damaged_on_a_node_is_fetched_again(built: BusDataSet, cache: Path) -> None:
    (await built.open()).close()
    for shard in built.manifest.splits["train"]:
        (cache / "data_sets" / shard.name).write_bytes(bytes(shard.bytes))
    source = await built.open()
    with pytest.raises(Unavailable, match=r"does not hold what was built, at byte 0; it is fetched again"):
        source.batch("train", 0, 0)
    source.close()
    for _ in built.manifest.splits["train"]:  # a step may need any of them
        again = await built.open()
        try:
            assert again.batch("train", 0, 0)["inputs"].any()
            return
        except Unavailable:
            again.close()
    pytest.fail("it was not fetched again")


async def test_a_file_that_was_damaged_on_the_bus_is_named(built: BusDataSet) -> None:
    shard = built.manifest.splits["train"][0]
    await built.files.put_bytes(shard.name, bytes(shard.bytes))
    with pytest.raises(BadData, match=f"{shard.name} on the bus does not hold what was built"):
        await built.open()
