"""A new root: users, secrets and tokens stay, credentials of the old one end with their grace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.credentials import root_public
from bus.embedded import find_binary
from bus.guard_keys import GuardKeys
from dmsc.async_client import AsyncClient
from dmsc.state_folder import StateFolder, write_private
from schemas.access import StoredUser
from schemas.envelope import EntityKind as K
from schemas.errors import BusUnreachable, Refused
from tests.integration.dmsc.command_line import dmsc
from tests.integration.mesh.conftest import Mesh, start_mesh, stop_mesh
from tests.patience import PATIENCE_S

OPTIONS = ("--cluster", "a", "--slots", "0")


async def connects(mesh: Mesh, root: str) -> bool:
    """Whether the holder of a root gets in."""
    try:
        async with Bus.connect(mesh.servers, name="somebody", kind=K.TAP, token=root, connect_timeout_s=5.0):
            return True
    except (Refused, BusUnreachable):
        return False


async def sealed_users(mesh: Mesh) -> dict[str, str]:
    async with Bus.connect(
        mesh.servers, name="look", kind=K.AUTHORIZER, token=mesh.bus_token, connect_timeout_s=PATIENCE_S
    ) as bus:
        entries = await bus.bucket(subjects.USER_RECORD).entries()
        return {one.key: one.message.sealed for one in entries if isinstance(one.message, StoredUser)}


async def prepare(mesh: Mesh) -> str:
    async with AsyncClient(state=mesh.state) as admin:
        token = (await admin.add_user("ruth", "researcher")).token or ""
    async with AsyncClient(state=mesh.state, token=token) as ruth:
        await ruth.set_secret("corpus", "https://ruth:password@host/a")
    return token


async def look(mesh: Mesh, token: str) -> tuple[set[str], set[str]]:
    """Who is a user, and which secrets one of them has, who shows the token from before."""
    async with AsyncClient(state=mesh.state) as admin, AsyncClient(state=mesh.state, token=token) as ruth:
        users = {user.name for user in await admin.users()}
        return users, {one.name for one in await ruth.secrets()}


def test_users_tokens_and_secrets_survive_and_the_old_root_ends(tmp_path: Path) -> None:
    find_binary()
    state = tmp_path / "state"
    mesh = start_mesh(state, *OPTIONS)
    try:
        token = asyncio.run(prepare(mesh))
        before = asyncio.run(sealed_users(mesh))
        running = dmsc("credential", "rotate", "--state", str(state), cwd=tmp_path)
        assert running.returncode != 0, "not while it runs"
        assert running.stderr.count("\n") == 1
    finally:
        stop_mesh(mesh)
    old = mesh.bus_token or ""
    rotated = dmsc("credential", "rotate", "--grace", "1h", "--state", str(state), cwd=tmp_path)
    assert rotated.returncode == 0, rotated.stderr
    mesh = start_mesh(state, *OPTIONS)
    try:
        assert mesh.bus_token not in (None, old)
        users, secrets = asyncio.run(look(mesh, token))
        assert "ruth" in users
        assert secrets == {"corpus"}
        after = asyncio.run(sealed_users(mesh))
        assert after.keys() == before.keys()
        assert after["ruth"][:14] != before["ruth"][:14], "sealed to the new root's keys"
        assert asyncio.run(connects(mesh, old)), "for the time of grace"
    finally:
        stop_mesh(mesh)
    folder = StateFolder(state)
    keys = GuardKeys.read(folder.guard_file)
    assert keys.before == root_public(old)
    write_private(folder.guard_file, folder.guard_file.read_text().replace(str(keys.before_until), "1.0"))
    mesh = start_mesh(state, *OPTIONS)
    try:
        assert not asyncio.run(connects(mesh, old))
        assert asyncio.run(connects(mesh, mesh.bus_token or ""))
        assert "ruth" in asyncio.run(look(mesh, token))[0]
    finally:
        stop_mesh(mesh)


@pytest.mark.parametrize("written", [1, 2, 3])
def test_killed_at_any_point_it_leaves_a_folder_that_opens(
    tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of its writes it is as if the machine had lost power."""
    folder = StateFolder(tmp_path)
    tmp_path.chmod(0o700)
    folder.write_tokens()
    old = folder.bus_token()
    count = 0

    def write(path: Path, text: str, mode: int = 0o600) -> None:
        nonlocal count
        write_private(path, text, mode)
        count += 1
        if count == written:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dmsc.state_folder.write_private", write)
        with pytest.raises(KeyboardInterrupt):
            folder.rotate(60.0)
    assert count == written, "it fired"
    folder.write_tokens()
    root = folder.bus_token()
    assert root is not None
    assert (root == old) is (written < 3)
    assert GuardKeys.read(folder.guard_file).root == root_public(root)
    assert folder.root_before() == old
    folder.rotate(60.0)
    assert folder.bus_token() not in (None, root)
    assert folder.root_before() == root
