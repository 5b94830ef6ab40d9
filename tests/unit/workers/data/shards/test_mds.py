"""MDS shards by index: every encoding, compressed or not, from a folder or a server; damage has a name."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from tests.builders.range_server import RangeServer, range_server
from tests.builders.shards import mds_files, picture, write_all
from workers.data.samples import (
    BlockSamples,
    ExpectingSamples,
    Opening,
    SeededSamples,
    UnreadableSample,
)
from workers.data.shards import open_shards
from workers.data.shards.shard_samples import RowSamples, ShardSamples

COLUMNS = {
    "id": "int",
    "name": "str",
    "raw": "bytes",
    "small": "uint16",
    "real": "float32",
    "fixed": "ndarray:int32:3",
    "typed": "ndarray:float32",
    "free": "ndarray",
    "facts": "json",
    "image": "png",
}


def sample(number: int) -> dict[str, Any]:
    return {
        "id": number - 3,
        "name": f"näme {number}" * (number % 3),
        "raw": bytes(range(number % 5)),
        "small": number,
        "real": number / 4,
        "fixed": np.arange(3, dtype=np.int32) + number,
        "typed": np.arange(4, dtype=np.float32).reshape(2, 2) * number,
        "free": np.full((1, 2, 3), number, dtype=np.int64),
        "facts": {"n": number},
        "image": picture(number),
    }


SHARDS = [[sample(number) for number in range(start, end)] for start, end in [(0, 4), (4, 5), (5, 11)]]
ALL = [each for shard in SHARDS for each in shard]


def opened(source: str, spool: Path, **more: Any) -> ShardSamples:
    spec = SourceSpec.model_construct(kind="shards", source=source, **more)
    return open_shards(spec, Opening("data", 0, spool))


def check(samples: ShardSamples) -> None:
    assert len(samples) == len(ALL)
    assert isinstance(samples, ExpectingSamples)
    assert isinstance(samples, BlockSamples)
    assert samples.blocks == (4, 1, 6)
    for index in (10, 0, 4, 3, 5, 9, 0):
        found, wanted = samples[index], ALL[index]
        assert (found["id"], found["name"], found["facts"]) == (
            wanted["id"],
            wanted["name"],
            wanted["facts"],
        )
        assert found["raw"].tobytes() == wanted["raw"]
        assert (int(found["small"]), float(found["real"])) == (wanted["small"], wanted["real"])
        for name in ("fixed", "typed", "free"):
            assert found[name].dtype == wanted[name].dtype
            assert np.array_equal(found[name], wanted[name])
        assert found["image"].shape == (3, 6, 5)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with range_server() as running:
        yield running


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


@pytest.mark.parametrize(
    ("compression", "pack"),
    [(None, gzip.compress), ("zstd:7", zstd), ("gz", gzip.compress), ("bz2:9", bz2.compress)],
)
def test_every_sample_comes_back_by_its_index(
    compression: str | None, pack: Callable[[bytes], bytes], tmp_path: Path, server: RangeServer
) -> None:
    files = mds_files(COLUMNS, SHARDS, compression=compression, pack=pack)
    write_all(tmp_path / "mds", files)
    server.files |= files
    local, remote = opened(str(tmp_path / "mds"), tmp_path), opened(server.url, tmp_path)
    remote.expect([3, 2, 10])
    for samples in (local, remote):
        check(samples)
        samples.close()
    assert opened(str(tmp_path / "mds"), tmp_path).digest == local.digest
    assert opened(server.url, tmp_path).digest == remote.digest


def test_columns_are_chosen_and_named(tmp_path: Path) -> None:
    write_all(tmp_path, mds_files(COLUMNS, SHARDS))
    samples = opened(str(tmp_path), tmp_path, columns={"inputs": "fixed", "targets": "id"})
    assert list(samples[2]) == ["inputs", "targets"]
    with pytest.raises(BadData, match=r"data\.columns: there is no 'label' in .*there are id, name"):
        opened(str(tmp_path), tmp_path, columns={"targets": "label"})


USERS = """
import numpy

def plain(sample):
    return {"x": sample["free"] * 2 + numpy.random.randint(1000), "y": len(sample["name"])}

def broken(sample):
    return 1 / 0 if sample["id"] == -1 else [sample]
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module beside the shards."""
    sys.modules.pop("users_shards", None)
    (tmp_path / "users_shards.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DMSC_CODE_PATH", str(tmp_path))
    write_all(tmp_path, mds_files(COLUMNS, SHARDS))
    return "users_shards"


def test_the_users_function_makes_the_sample_seeded_for_it(users: str, tmp_path: Path) -> None:
    samples = opened(str(tmp_path), tmp_path, transform=f"{users}:plain", columns={"inputs": "x"})
    assert isinstance(samples, SeededSamples)
    first, again, other = (samples.draw(4, seed)["inputs"] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert list(opened(str(tmp_path), tmp_path, transform=f"{users}:plain")[3]) == ["x", "y"]


@pytest.mark.parametrize(
    ("transform", "index", "text"),
    [
        ("broken", 2, "data.transform .*broken failed at sample 2: ZeroDivisionError"),
        ("broken", 3, "returned a list; it must return a mapping"),
        ("plain", 3, "data.columns: .*plain gave no 'gone', but x, y"),
    ],
)
def test_a_users_function_that_fails_is_named(
    transform: str, index: int, text: str, users: str, tmp_path: Path
) -> None:
    samples = opened(str(tmp_path), tmp_path, transform=f"{users}:{transform}", columns={"inputs": "gone"})
    with pytest.raises(BadData, match=text):
        samples[index]


def test_other_data_have_another_digest(tmp_path: Path) -> None:
    digests = set()
    for number, shards in enumerate((SHARDS, SHARDS[:2])):
        write_all(tmp_path / str(number), mds_files(COLUMNS, shards))
        digests.add(opened(str(tmp_path / str(number)), tmp_path).digest)
    assert len(digests) == 2


def test_other_rows_of_the_same_sizes_have_another_digest(tmp_path: Path) -> None:
    digests = set()
    for first in (0, 50):
        rows = [[{"x": np.arange(3, dtype=np.int32) + first}]]
        files = mds_files({"x": "ndarray:int32:3"}, rows)
        write_all(tmp_path / str(first), files)
        digests.add(opened(str(tmp_path / str(first)), tmp_path).digest)
    assert len(digests) == 2


def test_a_damaged_sample_is_named_with_its_shard(tmp_path: Path) -> None:
    files = mds_files({"x": "ndarray", "image": "png"}, [[sample_of(n) for n in range(3)]])
    content = bytearray(files["shard.00000.mds"])
    content[-60:] = bytes(60)
    write_all(tmp_path, files | {"shard.00000.mds": bytes(content)})
    samples = opened(str(tmp_path), tmp_path)
    samples[0]
    with pytest.raises(UnreadableSample, match=r"shard\.00000\.mds: sample 2 can't be read"):
        samples[2]


def sample_of(number: int) -> dict[str, Any]:
    return {"x": np.arange(number + 1, dtype=np.int64), "image": picture(number)}


def test_offsets_that_lead_elsewhere_make_a_sample_unreadable(tmp_path: Path) -> None:
    files = mds_files({"x": "ndarray"}, [[{"x": np.arange(4, dtype=np.int64)}] * 3])
    content = bytearray(files["shard.00000.mds"])
    content[8:12] = (1 << 30).to_bytes(4, "little")
    write_all(tmp_path, files | {"shard.00000.mds": bytes(content)})
    samples = opened(str(tmp_path), tmp_path)
    samples[2]
    for index in (0, 1):
        with pytest.raises(UnreadableSample, match=rf"sample {index} lies at bytes"):
            samples[index]


def changed(**facts: Any) -> bytes:
    index = json.loads(mds_files(COLUMNS, SHARDS)["index.json"])
    index["shards"][1].update(facts)
    return json.dumps(index).encode()


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (b"{", r"index\.json is no index of MDS shards"),
        (b"[" * 100_000, r"is no index of MDS shards"),
        (b'{"version": 1, "shards": []}', "MDS of version 1"),
        (changed(format="jsonl"), "shard 1 has the format jsonl"),
        (changed(column_encodings=["pkl"] * 10), "column id has the encoding pkl: a pickle can hold code"),
        (changed(column_encodings=["wav"] * 10), "column id has the encoding wav, which is not read"),
        (changed(column_encodings=["ndarray:O:3"] * 10), "names no type or shape"),
        (changed(column_sizes=[7] * 10), "7 bytes for int, which has 8"),
        (changed(samples=-1), "a size is negative"),
        (changed(compression="br", zip_data={"basename": "x", "bytes": 3}), "compressed by br"),
    ],
)
def test_an_index_that_is_none_is_refused_in_one_line(index: bytes, text: str, tmp_path: Path) -> None:
    write_all(tmp_path, mds_files(COLUMNS, SHARDS) | {"index.json": index})
    with pytest.raises(BadData, match=text) as caught:
        opened(str(tmp_path), tmp_path)
    assert "\n" not in caught.value.text


@pytest.mark.parametrize("name", ["../other/shard.mds", "/etc/passwd"])
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    index = changed(raw_data={"basename": name, "bytes": 10, "hashes": {}})
    write_all(tmp_path / "mds", mds_files(COLUMNS, SHARDS) | {"index.json": index})
    write_all(tmp_path / "other", {"shard.mds": bytes(10)})
    with pytest.raises(BadData, match="is not the name of a file below"):
        opened(str(tmp_path / "mds"), tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content[:-1], r"has [\d,]+ bytes, and index\.json says"),
        (lambda content: bytes(4) + content[4:], "its head does not tell of the 4 samples"),
    ],
)
def test_a_shard_that_is_not_as_its_index_says_stops_the_job(
    change: Callable[[bytes], bytes], text: str, tmp_path: Path
) -> None:
    files = mds_files(COLUMNS, SHARDS)
    write_all(tmp_path, files | {"shard.00000.mds": change(files["shard.00000.mds"])})
    samples = opened(str(tmp_path), tmp_path)
    with pytest.raises(BadData, match=text) as caught:
        samples[0]
    assert not isinstance(caught.value, UnreadableSample)
    samples[5]


def test_a_compressed_shard_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    files = mds_files(COLUMNS, SHARDS, compression="gz")
    index = json.loads(files["index.json"])
    index["shards"][0]["raw_data"]["bytes"] -= 1
    write_all(tmp_path, files | {"index.json": json.dumps(index).encode()})
    samples = opened(str(tmp_path), tmp_path)
    with pytest.raises(BadData, match=r"shard\.00000\.mds\.gz is damaged: it unpacks to more than"):
        samples[0]


def test_a_source_that_is_neither_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=r"data\.source .*holds neither index\.json \(MDS\) nor \.tar files"):
        opened(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(BadData, match=r"can't be read|holds neither"):
        opened(str(tmp_path / "gone"), tmp_path)


@pytest.mark.parametrize("columns", [{}, {"targets": "y"}])
def test_rows_of_a_fixed_size_come_at_once_as_one_by_one(
    columns: dict[str, str], tmp_path: Path, server: RangeServer
) -> None:
    rows = [{"x": np.arange(3, dtype=np.int32) + number, "y": number} for number in range(11)]
    files = mds_files({"x": "ndarray:int32:3", "y": "int"}, [rows[:4], rows[4:5], rows[5:]])
    write_all(tmp_path / "mds", files)
    server.files |= files
    indices = [10, 0, 4, 4, 7, 3]
    for source in (str(tmp_path / "mds"), server.url):
        samples = opened(source, tmp_path, columns=columns)
        assert isinstance(samples, RowSamples)
        batch = samples.gather(indices)
        assert list(batch) == list(samples[0])
        for name, values in batch.items():
            assert values.dtype == np.asarray(samples[0][name]).dtype
            assert values.tolist() == [np.asarray(samples[index][name]).tolist() for index in indices]
        with pytest.raises(IndexError):
            samples.gather([0, 11])


def test_rows_of_a_file_that_changes_are_told(tmp_path: Path) -> None:
    rows = [{"x": np.arange(3, dtype=np.int32) + number} for number in range(4)]
    write_all(tmp_path / "mds", mds_files({"x": "ndarray:int32:3"}, [rows]))
    samples = opened(str(tmp_path / "mds"), tmp_path)
    assert isinstance(samples, RowSamples)
    samples.gather([0])
    path = tmp_path / "mds" / "shard.00000.mds"
    for content in (path.read_bytes()[:-1], path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(BadData, match="has changed since it was opened"):
            samples.gather([3, 0])
