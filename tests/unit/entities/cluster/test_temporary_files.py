"""Nothing of ours is written through what somebody has put in its place."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from bus.files.plain_files import plain
from bus.server.embedded import EmbeddedServer
from entities.cluster.fork_server_client import ForkServerClient
from schemas.errors import BadInput

PRECIOUS = "keep"


def _link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def _pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [_link, _pipe])
@pytest.mark.parametrize("name", ["server.conf", "stderr.log"])
async def test_a_server_writes_through_nothing_that_was_planted(
    tmp_path: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    precious, store = tmp_path / "precious", tmp_path / "store"
    precious.write_text(PRECIOUS)
    precious.chmod(0o644)
    store.mkdir(mode=0o700)
    plant(store / name, precious)
    with pytest.raises(BadInput, match=rf"{name} is no plain file: remove it"):
        async with EmbeddedServer(store_dir=store, token="t"):
            raise AssertionError
    assert precious.read_text() == PRECIOUS
    assert stat.S_IMODE(precious.stat().st_mode) == 0o644


@pytest.mark.parametrize("plant", [_link, _pipe])
async def test_a_fork_server_writes_through_nothing_that_was_planted(
    tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text(PRECIOUS)
    plant(tmp_path / "node-fork-server.log", precious)
    async with ForkServerClient(name="node", logs=tmp_path) as client:
        with pytest.raises(BadInput, match=r"fork-server\.log is no plain file: remove it"):
            await client.wait_ready()
    assert precious.read_text() == PRECIOUS


def test_a_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with open(tmp_path / "a.log", "ab", opener=plain) as file:
        file.write(b"a line")
    assert stat.S_IMODE((tmp_path / "a.log").stat().st_mode) == 0o600
    (tmp_path / "b.log").symlink_to(tmp_path / "a.log")
    with pytest.raises(BadInput, match=r"b\.log is no plain file"):
        plain(tmp_path / "b.log", os.O_WRONLY)
    assert (tmp_path / "a.log").read_bytes() == b"a line"


def test_who_wants_no_log_names_dev_null(tmp_path: Path) -> None:
    with open(os.devnull, "ab", opener=plain) as file:
        file.write(b"nobody reads it")
    with pytest.raises(BadInput, match="no plain file"), open("/dev/zero", "ab", opener=plain):
        pass
