"""The state folder: one owner, private secrets, nothing left."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from dmsc.state.state_folder import FORMAT, MeshFile, StateFolder
from schemas.errors import BadInput
from tests.patience import PATIENCE_S


def test_one_owner_at_a_time_and_nothing_left(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "with space")
    assert folder.owner() is None
    with folder.hold():
        folder.write_mesh(
            MeshFile(servers=("nats://x:1",), gateways={"a": "http://x"}, pid=1, started_at=1.0)
        )
        assert folder.owner() == os.getpid()
        with (
            pytest.raises(BadInput, match=rf"a mesh already runs on .* \(pid {os.getpid()}\).*dmsc down"),
            folder.hold(),
        ):
            raise AssertionError
        mesh = folder.mesh()
        assert mesh is not None
        assert mesh.servers == ("nats://x:1",)
    assert folder.owner() is None
    assert folder.mesh() is None
    assert list(folder.path.iterdir()) == []


def test_what_a_killed_owner_left_is_not_believed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from dmsc.state.state_folder import *\n"
        "folder = StateFolder(Path(sys.argv[1]))\n"
        "with folder.hold():\n"
        "    folder.write_mesh(MeshFile(servers=('nats://x:1',), pid=os.getpid(), started_at=1.0))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=PATIENCE_S, check=False)
    assert done.returncode == -9
    folder = StateFolder(tmp_path)
    assert folder.mesh_file.exists()
    assert folder.mesh() is None
    with folder.hold():
        assert folder.owner() == os.getpid()


def test_who_lost_the_folder_takes_nothing_from_the_next_owner(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    former, present = ExitStack(), ExitStack()
    former.enter_context(folder.hold())
    shutil.rmtree(folder.path)
    with present:
        present.enter_context(folder.hold())
        folder.write_mesh(MeshFile(servers=("nats://x:1",), pid=os.getpid(), started_at=1.0))
        former.close()
        assert folder.owner() == os.getpid()
        assert folder.mesh() is not None
    assert list(folder.path.iterdir()) == []


def test_tokens_are_private_and_stay(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_tokens()
    first = (folder.token(), folder.bus_token())
    assert all(first)
    assert first[0] != first[1]
    for name in ("token", "bus_token", "tokens.yaml", "guard.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    folder.write_tokens()
    assert (folder.token(), folder.bus_token()) == first
    (user,) = yaml.safe_load(folder.tokens_file.read_text())["users"]
    assert (user["name"], user["role"]) == ("admin", "admin")
    assert str(first[0]) not in folder.tokens_file.read_text()


def test_users_that_were_added_stay_when_the_admin_token_is_new(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_tokens()
    with folder.tokens_file.open("a") as file:
        file.write("  - {name: eve, role: viewer, token_sha256: " + "0" * 64 + "}\n")
    (tmp_path / "token").unlink()
    folder.write_tokens()
    assert [user["name"] for user in yaml.safe_load(folder.tokens_file.read_text())["users"]] == [
        "eve",
        "admin",
    ]


def test_a_folder_without_a_format_gets_one_and_loses_nothing(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_tokens()
    (tmp_path / "version").unlink()  # as one of before
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with folder.hold():
        folder.write_tokens()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.pop("version") == f"{FORMAT}\n".encode()
    assert after == before


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        (str(FORMAT + 1), rf"newer dmsc: its format is {FORMAT + 1}, .* up to {FORMAT}; use the newer dmsc"),
        ("9" * 5_000, "newer dmsc"),
        ("new", "'new', which is no format"),
        ("²", "which is no format"),
        ("-1", "which is no format"),
    ],
)
def test_a_folder_of_a_newer_version_is_refused_in_a_line_and_stays(
    tmp_path: Path, stamp: str, words: str
) -> None:
    folder = StateFolder(tmp_path)
    (tmp_path / "version").write_text(stamp)
    for use in (folder.write_tokens, folder.write_host_keys, folder.hold().__enter__):
        with pytest.raises(BadInput, match=words) as refused:
            use()
        assert "\n" not in refused.value.text
        assert [path.name for path in tmp_path.iterdir()] == ["version"]
        assert (tmp_path / "version").read_text() == stamp


def test_a_folder_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="can't use"), StateFolder(tmp_path / "file" / "below").hold():
        raise AssertionError


def test_a_planted_link_is_neither_locked_nor_written_through(tmp_path: Path) -> None:
    folder, precious = StateFolder(tmp_path / "state"), tmp_path / "precious"
    precious.write_text("keep")
    folder.path.mkdir(mode=0o755)
    folder.lock_file.symlink_to(precious)
    with pytest.raises(BadInput, match="can't lock"), folder.hold():
        raise AssertionError
    assert folder.owner() is None
    folder.lock_file.unlink()
    (folder.path / f".token.{os.getpid()}").symlink_to(precious)  # where the new file is made up
    with folder.hold():
        folder.write_tokens()
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.token()
    assert precious.read_text() == "keep"


@pytest.mark.parametrize(
    "name",
    [
        *("lock", "mesh.json", "version", "token", "bus_token", "tokens.yaml", "guard.json", "user_key"),
        *("logs/up.log", "nats/server.conf", "nats/server.log", "tls/ca.pem", "audit/authorizer/1.head"),
    ],
)
def test_nobody_waits_at_a_pipe_in_a_files_place(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match=f"{pipe} is no plain file: remove it"), StateFolder(tmp_path).hold():
        raise AssertionError
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_pipes_of_others_are_theirs(tmp_path: Path) -> None:
    pipe = tmp_path / "stores" / "j" / "pipe"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with StateFolder(tmp_path).hold():
        pass


@pytest.mark.parametrize("ask", [StateFolder.token, StateFolder.bus_token, StateFolder.mesh])
def test_who_asks_a_folder_waits_at_no_pipe(tmp_path: Path, ask: Callable[[StateFolder], object]) -> None:
    for name in ("token", "bus_token", "mesh.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match="is no plain file: remove it"):
        ask(StateFolder(tmp_path))
