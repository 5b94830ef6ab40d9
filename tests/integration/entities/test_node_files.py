"""Files below a job's URL as node agents read them for gateways: real bus, fork servers, files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts
from bus.subjects import READ_FILES
from entities.cluster.file_requests import BLOCK_BYTES
from entities.job_files import node_files
from schemas.envelope import EntityKind
from schemas.errors import BadInput, NotFound, Unavailable
from schemas.files import PAGE_NAMES, PIECE_BYTES, ReadFiles
from tests.integration.entities.cluster_mesh import stand_in_mesh

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="death with the parent"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What jobs of these nodes may name."""
    return tmp_path_factory.mktemp("jobs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[Bus]:
    """A gateway's connection; beside it the agents `a-n`, and `dying-n`, whose readers are killed."""
    allowed = (str(folder),)
    async with (
        stand_in_mesh(tmp_path_factory.mktemp("cluster")) as mesh,
        Bus.connect(mesh.url, name="gateway", kind=EntityKind.GATEWAY) as bus,
        mesh.agent("a", worker_package="workers", allow_urls=allowed),
        mesh.agent("dying", allow_urls=allowed),
    ):
        yield bus


def files(bus: Bus, path: Path, *agents: str) -> ReadableArtifacts:
    return node_files.files_of(f"file://{path}", bus, lambda: dict.fromkeys(agents or ("a-n",), ""))


async def test_a_file_of_several_blocks_comes_whole_and_in_ranges(gateway: Bus, folder: Path) -> None:
    content = os.urandom(2 * BLOCK_BYTES + 12_345)
    (folder / "weights").write_bytes(content)
    found = files(gateway, folder)
    assert await found.size("weights") == len(content)
    assert await found.get_bytes("weights") == content
    for start, length in ((BLOCK_BYTES - 7, 14), (len(content) - 3, 99), (5, PIECE_BYTES + 1), (0, 0)):
        piece = b"".join([part async for part in found.open_range("weights", start, length)])
        assert piece == content[start : start + length]


async def test_who_begins_anew_reads_what_is_there_now(gateway: Bus, folder: Path) -> None:
    found = files(gateway, folder)
    for content in (b"a" * 2 * PIECE_BYTES, b"b" * 2 * PIECE_BYTES):
        (folder / "manifest").write_bytes(content)
        assert await found.get_bytes("manifest") == content


async def test_names_come_in_pages(gateway: Bus, folder: Path) -> None:
    many = folder / "many" / "x"
    many.mkdir(parents=True)
    names = [f"x/{number:05d}" for number in range(PAGE_NAMES + 7)]
    for name in names:
        (folder / "many" / name).touch()
    found = files(gateway, folder / "many")
    assert await found.list() == names
    assert await found.list("x/0000") == names[:10]
    assert await files(gateway, folder / "nowhere").list() == []


async def test_a_pipe_a_link_and_what_is_missing_are_refused_in_one_line(gateway: Bus, folder: Path) -> None:
    os.mkfifo(folder / "manifest.json")
    (folder / "link").symlink_to("/etc/hostname")
    found = files(gateway, folder)
    for name in ("manifest.json", "link", "../x"):
        with pytest.raises(BadInput) as caught:
            await found.get_bytes(name)
        assert "\n" not in caught.value.text
    with pytest.raises(NotFound, match="there is no missing"):
        await found.size("missing")
    assert not await found.exists("missing")


@pytest.mark.parametrize(
    "url", ["/etc", "s3://bucket/x", "bus://artifacts/j", "secret://u/n", "a::file:///etc"]
)
async def test_a_node_opens_only_what_its_jobs_may_name(gateway: Bus, url: str) -> None:
    question = ReadFiles(url=url, what="piece", name="hostname", count=10)
    with pytest.raises(BadInput):
        await gateway.request(READ_FILES, question, agent="a-n")


async def test_a_reader_that_is_killed_costs_nothing_where_another_node_is(
    gateway: Bus, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files.random, "random", lambda: 0.5)  # in the order in which they are given
    own = folder / "own"
    own.mkdir()
    (own / "x").write_bytes(b"content")
    with pytest.raises(Unavailable, match="killed by SIGKILL"):
        await files(gateway, own, "dying-n").size("x")
    (own / "killed").unlink()
    found = files(gateway, own, "gone-n", "a-n")
    assert await found.get_bytes("x") == b"content"
    assert await files(gateway, own, "dying-n", "a-n").get_bytes("x") == b"content"
    assert (own / "killed").exists()


async def test_without_a_node_nothing_is_opened(gateway: Bus, folder: Path) -> None:
    (folder / "there").touch()
    found = node_files.files_of(str(folder), gateway, dict)
    with pytest.raises(Unavailable, match="no node is up to read it; `dmsc join` adds one"):
        await found.exists("there")


async def test_what_a_secret_stands_for_is_read_for_who_may_hand_it_on(gateway: Bus, folder: Path) -> None:
    (folder / "hidden").write_bytes(b"content")
    secrets = json.dumps({"u/n": f"file://{folder}"})
    found = node_files.files_of("secret://u/n", gateway, lambda: {"a-n": ""}, secrets=secrets)
    assert await found.get_bytes("hidden") == b"content"
    with pytest.raises(BadInput, match="only the job's own processes can open it"):
        node_files.files_of("secret://u/n", gateway, lambda: {"a-n": ""})
