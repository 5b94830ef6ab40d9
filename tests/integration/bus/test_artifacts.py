"""One folder of files under each kind of URL; what appears is complete, and names stay inside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bus.files.artifacts import PIECE_BYTES, Artifacts, open_artifacts, open_filesystem, restrict
from schemas.errors import BadInput, NotFound
from schemas.urls import UrlRules
from tests.conftest import Connect

KINDS = ("path", "file", "memory", "bus")


@pytest.fixture(params=KINDS)
async def artifacts(request: pytest.FixtureRequest, tmp_path: Path, connect: Connect) -> Artifacts:
    folder = f"{request.node.name.replace('[', '-').replace(']', '')}/files"
    if request.param == "bus":
        return open_artifacts(f"bus://{folder}", await connect("artifacts"))
    urls = {
        "path": str(tmp_path / folder),
        "file": f"file://{tmp_path}/{folder}",
        "memory": f"memory://{folder}",
    }
    return open_artifacts(urls[request.param], None)


async def test_files_and_bytes_go_in_and_come_out(artifacts: Artifacts, tmp_path: Path) -> None:
    content = os.urandom(PIECE_BYTES + 77)
    (tmp_path / "source").write_bytes(content)
    await artifacts.put_file("deep/file", tmp_path / "source")
    await artifacts.put_bytes("bytes", b"1")
    await artifacts.put_bytes("bytes", b"12345")  # takes the place of the first
    assert await artifacts.list() == ["bytes", "deep/file"]
    assert await artifacts.list("deep") == ["deep/file"]
    assert await artifacts.get_bytes("bytes") == b"12345"
    assert await artifacts.size("deep/file") == len(content)
    await artifacts.get_file("deep/file", tmp_path / "out" / "copy")
    assert (tmp_path / "out" / "copy").read_bytes() == content
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["copy"]


@pytest.mark.parametrize(
    ("start", "length"), [(0, None), (0, 10), (PIECE_BYTES - 5, 10), (PIECE_BYTES + 70, 1000), (5, 0)]
)
async def test_ranges(artifacts: Artifacts, start: int, length: int | None) -> None:
    content = os.urandom(PIECE_BYTES + 77)
    await artifacts.put_bytes("file", content)
    found = b"".join([piece async for piece in artifacts.open_range("file", start, length)])
    assert found == content[start : None if length is None else start + length]


async def test_what_is_not_there(artifacts: Artifacts, tmp_path: Path) -> None:
    assert await artifacts.list() == []
    assert not await artifacts.exists("absent")
    with pytest.raises(NotFound):
        await artifacts.get_bytes("absent")
    with pytest.raises(NotFound):
        await artifacts.get_file("absent", tmp_path / "copy")
    with pytest.raises(NotFound):
        await artifacts.size("absent")
    assert not (tmp_path / "copy").exists()


async def test_deleting_by_prefix(artifacts: Artifacts) -> None:
    for name in ("a/1", "a/2", "b"):
        await artifacts.put_bytes(name, b"x")
    await artifacts.delete("a/")
    assert await artifacts.list() == ["b"]
    assert not await artifacts.exists("a/1")
    await artifacts.delete()
    await artifacts.delete()
    assert await artifacts.list() == []


@pytest.mark.parametrize("name", ["", "../up", "a/../../up", "/absolute", "a//b", "back\\slash", "nul\0"])
async def test_names_that_lead_elsewhere_are_refused(artifacts: Artifacts, name: str) -> None:
    with pytest.raises(BadInput, match="is not the name of an artifact"):
        await artifacts.put_bytes(name, b"x")


async def test_folders_on_the_bus_are_apart(connect: Connect) -> None:
    bus = await connect("artifacts")
    one, other = open_artifacts("bus://apart/1", bus), open_artifacts("bus://apart/10", bus)
    await one.put_bytes("x", b"1")
    await other.put_bytes("y", b"2")
    assert await one.list() == ["x"]
    assert await open_artifacts("bus://apart", bus).list() == ["1/x", "10/y"]


async def test_a_local_file_is_never_seen_in_part(tmp_path: Path) -> None:
    artifacts = open_artifacts(str(tmp_path), None)
    sizes = set()
    content = b"x" * (8 << 20)
    writing = asyncio.create_task(artifacts.put_bytes("file", content))
    while not writing.done():
        if await artifacts.exists("file"):
            sizes.add(await artifacts.size("file"))
        assert set(await artifacts.list()) <= {"file"}
    await writing
    assert sizes <= {len(content)}
    assert os.listdir(tmp_path) == ["file"]


class VersionedMemory(MemoryFileSystem):
    """Orders arguments as s3fs does (`version_id` before `start`)."""

    protocol = "versioned-memory"

    def cat_file(self, path, version_id=None, start=None, end=None, **more):
        assert version_id is None
        return super().cat_file(path, start=start, end=end, **more)


async def test_a_range_from_a_store_whose_files_have_versions() -> None:
    fsspec.register_implementation("versioned-memory", VersionedMemory, clobber=True)
    artifacts = open_artifacts("versioned-memory://runs", None)
    await artifacts.put_bytes("file", b"0123456789")
    assert b"".join([piece async for piece in artifacts.open_range("file", 2, 5)]) == b"23456"


async def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    artifacts = open_artifacts(str(tmp_path), None)
    await artifacts.put_bytes("file", b"old")
    with pytest.raises(NotFound):
        await artifacts.put_file("file", tmp_path / "no-such-source")
    assert await artifacts.get_bytes("file") == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("bus://artifacts", "not connected to a bus"),
        ("nothing://x", "nothing"),
        ("abfs://container/x", "abfs://container/x: "),  # known to fsspec, its driver is not installed
    ],
)
def test_urls_that_cannot_be_opened(url: str, text: str) -> None:
    if url.startswith("abfs") and "abfs" in fsspec.registry:
        pytest.skip("the driver of abfs is installed here")
    with pytest.raises(BadInput) as caught:
        open_artifacts(url, None)
    assert text in caught.value.text
    assert "\n" not in caught.value.text


@pytest.fixture
def restricted(tmp_path: Path) -> Iterator[Path]:
    """A folder that jobs may name, in a process that keeps to it."""
    folder = tmp_path / "allowed"
    folder.mkdir()
    restrict(UrlRules.of((str(folder),), "/"), [str(folder / "state")])
    yield folder
    restrict(UrlRules(everything=True))


async def test_links_lead_nowhere(restricted: Path, tmp_path: Path) -> None:
    """Whoever may write below a folder gets no rights of whoever reads, writes, lists or deletes there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    (restricted / "job" / "good").mkdir(parents=True)
    (restricted / "job" / "file").symlink_to(outside / "key")
    (restricted / "job" / "folder").symlink_to(outside)
    os.mkfifo(restricted / "job" / "pipe")
    artifacts = open_artifacts(str(restricted / "job"), None)
    for name in ("file", "folder/key", "pipe"):
        with pytest.raises(BadInput):
            await artifacts.get_bytes(name)
        with pytest.raises(BadInput):
            await artifacts.get_file(name, tmp_path / "got")
        assert not await artifacts.exists(name)
    with pytest.raises(BadInput):
        await artifacts.put_bytes("folder/new", b"x")
    await artifacts.put_bytes("file", b"x")  # takes the link's place, not that of what it leads to
    assert await artifacts.list() == ["file"]
    await artifacts.delete()
    assert sorted(path.name for path in outside.iterdir()) == ["key"]
    assert (outside / "key").read_text() == "secret"


async def test_what_is_opened_is_where_jobs_may_go(restricted: Path, tmp_path: Path) -> None:
    (restricted / "way-out").symlink_to(tmp_path)
    (restricted / "state").mkdir()
    for url in (
        tmp_path,
        restricted / "way-out",
        restricted / "state",
        restricted / ".." / "x",
        "memory://x",
    ):
        with pytest.raises(BadInput):
            open_artifacts(str(url), None)
        with pytest.raises(BadInput):
            open_filesystem(str(url))
    assert await open_artifacts(str(restricted), None).list() == []


@pytest.mark.usefixtures("restricted")
async def test_no_name_stands_for_the_link_local_addresses() -> None:
    restrict(UrlRules.of(("http://169.254.169.254/latest",), "/"))
    with pytest.raises(BadInput, match="link-local"):
        open_filesystem("http://169.254.169.254/latest/meta-data")
