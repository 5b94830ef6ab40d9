"""WebDataset's tar files by index, looked through once; damage has a name."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from tests.builders.range_server import RangeServer, range_server
from tests.builders.shards import picture, tar_file, write_all
from workers.data.samples import Opening, UnreadableSample
from workers.data.shards import open_shards
from workers.data.shards.opening import expanded
from workers.data.shards.shard_samples import ShardSamples
from workers.data.storage import node_cache


def saved(array: np.ndarray[Any, Any]) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def members(number: int) -> list[tuple[str, bytes]]:
    key = f"part/{number:04d}"
    return [
        (f"{key}.png", picture(number)),
        (f"{key}.cls", str(number).encode() + b"\n"),
        (f"{key}.meta.json", json.dumps({"n": number}).encode()),
        (f"{key}.npy", saved(np.arange(number + 1))),
    ]


FILES = {
    f"t-{shard:03d}.tar": tar_file([member for n in range(first, end) for member in members(n)])
    for shard, (first, end) in enumerate([(0, 3), (3, 4), (4, 9)])
}


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with range_server() as running:
        running.files |= FILES
        yield running


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    yield
    node_cache.grant(None, "")


def opened(source: str, spool: Path, **more: Any) -> ShardSamples:
    return open_shards(
        SourceSpec.model_construct(kind="shards", source=source, **more), Opening("data", 0, spool)
    )


def check(samples: ShardSamples) -> None:
    assert (len(samples), samples.blocks) == (9, (3, 1, 5))
    for index in (8, 0, 3, 4, 2):
        found = samples[index]
        assert sorted(found) == ["cls", "meta.json", "npy", "png"]
        assert found["cls"] == index
        assert found["meta.json"] == {"n": index}
        assert np.array_equal(found["npy"], np.arange(index + 1))
        assert found["png"].shape == (3, 6, 5)


@pytest.mark.parametrize("form", ["", "/*.tar", "/t-{000..002}.tar", "/t-{000,001,002}.tar"])
def test_every_sample_comes_back_by_its_index(form: str, tmp_path: Path) -> None:
    write_all(tmp_path / "wds", FILES)
    samples = opened(f"{tmp_path / 'wds'}{form}", tmp_path)
    check(samples)
    assert samples.digest == opened(str(tmp_path / "wds"), tmp_path).digest


def test_other_content_of_the_same_sizes_has_another_digest(tmp_path: Path, server: RangeServer) -> None:
    for number in range(2):
        files = {"t.tar": tar_file([("a.cls", str(number).encode())])}
        write_all(tmp_path / str(number), files)
        server.files |= {f"{number}/t.tar": files["t.tar"]}
    for base in (str(tmp_path), server.url):
        one, other = (opened(f"{base}/{number}/t.tar", tmp_path).digest for number in range(2))
        assert one != other


def test_one_file_and_a_server_do_as_well(tmp_path: Path, server: RangeServer) -> None:
    write_all(tmp_path, FILES)
    assert len(opened(str(tmp_path / "t-002.tar"), tmp_path)) == 5
    assert len(opened(f"{server.url}/t-002.tar", tmp_path)) == 5
    check(opened(f"{server.url}/t-{{000..002}}.tar", tmp_path))
    with pytest.raises(BadData, match="a web server tells no names of files"):
        opened(server.url, tmp_path)


def test_a_file_is_looked_through_once_per_node(tmp_path: Path, server: RangeServer) -> None:
    source = f"{server.url}/t-{{000..002}}.tar"
    node_cache.grant(tmp_path / "cache", "first")
    opened(source, tmp_path / "a").close()
    (tmp_path / "cache" / "limit").write_text("0")
    server.requests.clear()
    again = opened(source, tmp_path / "b")
    assert server.data_requests() == []
    check(again)
    for index in (tmp_path / "cache" / "indices").iterdir():
        index.write_bytes(index.read_bytes()[:-1] + b"x")
    check(opened(source, tmp_path / "c"))
    assert server.data_requests()


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_all_forms_of_tar(format: int, tmp_path: Path) -> None:
    long = "a" * 60 + "/" + ("b" * 90 if format != tarfile.USTAR_FORMAT else "b" * 30)
    (tmp_path / "x.tar").write_bytes(
        tar_file([(f"{long}.cls", b"7"), (f"{long}.PNG", picture(1))], format=format)
    )
    assert sorted(opened(str(tmp_path / "x.tar"), tmp_path)[0]) == ["cls", "png"]


def test_columns_choose_endings_and_spare_what_else_is_there(tmp_path: Path) -> None:
    write_all(tmp_path, {"x.tar": tar_file([("1.png", picture(1)), ("1.cls", b"4"), ("1.pkl", b"code")])})
    samples = opened(str(tmp_path), tmp_path, columns={"inputs": "png", "targets": "cls"})
    assert samples[0]["targets"] == 4
    with pytest.raises(BadData, match=r"holds \.pkl files: a pickle can hold code"):
        opened(str(tmp_path), tmp_path)
    with pytest.raises(BadData, match=r"data\.columns: there is no 'txt'"):
        opened(str(tmp_path), tmp_path, columns={"inputs": "txt"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            [*members(1)[:1], ("part/0002.png", b"no image"), ("part/0002.cls", b"1")],
            "part/0002 can't be read",
        ),
        ([*members(1)[:2], ("part/0002.png", picture(2))], r"part/0002 has no \.cls"),
        (
            [*members(1)[:2], ("part/0002.png", picture(2)), ("part/0002.cls", b"x")],
            "part/0002 can't be read",
        ),
        ([*members(1)[:2], ("part/0002.png", picture(2)[:-30]), ("part/0002.cls", b"1")], "can't be read"),
    ],
)
def test_a_damaged_sample_is_named_with_its_file(
    content: list[tuple[str, bytes]], text: str, tmp_path: Path
) -> None:
    content = [member for member in content if member[0] != "part/0001.cls"]
    write_all(tmp_path, {"x.tar": tar_file([*members(1)[:2], *content[1:]])})
    samples = opened(str(tmp_path), tmp_path)
    samples[0]
    with pytest.raises(UnreadableSample, match=rf"x\.tar: .*{text}"):
        samples[1]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (FILES["t-002.tar"][:3000], "cut off|unexpected end"),
        (gzip.compress(FILES["t-002.tar"]), "compressed by gzip"),
        (random.Random(1).randbytes(5000), "can't be read as a tar file"),
        (b"", "can't be read as a tar file"),
        (FILES["t-002.tar"].replace(b"part/0006.cls", b"part/0006.clx"), r"damaged at byte \d"),
        (tar_file([("README", b"x")]), "no samples are in it"),
        (tar_file([("a.cls", b"1"), ("a.cls", b"2")]), r"a\.cls is in it twice"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(content: bytes, text: str, tmp_path: Path) -> None:
    write_all(tmp_path, {"x.tar": content})
    with pytest.raises(BadData, match=rf"x\.tar.*({text})|{text}") as caught:
        opened(str(tmp_path / "x.tar"), tmp_path)
    assert "\n" not in caught.value.text


@pytest.mark.parametrize("braces", ["{5..1}", "{a..b}", "{x}", "{}", "{0..99999999}"])
def test_braces_that_name_nothing_are_refused(braces: str) -> None:
    with pytest.raises(BadData, match="names no files"):
        expanded(f"s3://b/x-{braces}.tar", "data")


def test_braces_are_what_a_shell_makes_of_them() -> None:
    assert expanded("s3://b/{a,c}/x-{08..10}.tar", "data") == (
        "s3://b",
        [f"{folder}/x-{number}.tar" for folder in "ac" for number in ("08", "09", "10")],
    )
    assert expanded("x/t{8..10}", "data") == ("x", ["t8", "t9", "t10"])
    assert expanded("s3://b/x.tar", "data") == ("s3://b/x.tar", [])
