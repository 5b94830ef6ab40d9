"""A new root: users, secrets and tokens stay, credentials of the old one end with their grace."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bus import subjects
from bus.security.credentials import root_public
from bus.server.embedded import find_binary
from dmsc.client.async_client import AsyncClient
from dmsc.launch import rotation
from dmsc.state.state_folder import StateFolder, write_private
from schemas.access import StoredUser
from schemas.envelope import EntityKind as K
from schemas.errors import BusUnreachable, Refused
from schemas.job import JobSpec, JobState
from tests.integration.mesh.conftest import Mesh, done, padded, running_mesh, tiny_job
from tests.integration.mesh.expected_weights import undisturbed
from tests.patience import PATIENCE_S

OPTIONS = ("--cluster", "a", "--slots", "0")
STANDING = {"admin"}
"""Users that each mesh has."""


async def connects(mesh: Mesh, root: str) -> bool:
    """Whether the holder of a root gets in."""
    try:
        async with mesh.bus("somebody", K.TAP, token=root, connect_timeout_s=5.0):
            return True
    except (Refused, BusUnreachable):
        return False


async def sealed_users(mesh: Mesh) -> dict[str, str]:
    async with mesh.bus("look", K.AUTHORIZER, connect_timeout_s=PATIENCE_S) as bus:
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


def rotate(mesh: Mesh, grace: str) -> str:
    """What the command said."""
    return mesh.printed("credential", "rotate", "--grace", grace)


def present(mesh: Mesh) -> Mesh:
    """The same with the root that is there now."""
    return replace(mesh, bus_token=StateFolder(mesh.state).bus_token())


def lasting(name: str, steps: int) -> JobSpec:
    """Its steps outlast a rotation."""
    return padded(tiny_job(name, training={"steps": steps}, parallel={"stages": 2}), pad_ms=40.0)


def test_a_job_goes_on_while_the_root_is_replaced_and_the_old_root_ends(tmp_path: Path) -> None:
    find_binary()
    with running_mesh(tmp_path / "state", "--cluster", "a", "--slots", "2") as started:
        mesh = started
        first = mesh.bus_token or ""
        token = asyncio.run(prepare(mesh))
        sealed = asyncio.run(sealed_users(mesh))
        spec = lasting("rotated", 40)
        expected = undisturbed(mesh.client, spec)
        job = mesh.client.submit(spec).job
        next(event for event in mesh.client.events(job) if event.kind == "step")
        mesh.printed("credential", "module", "--name", "mine", "-o", str(tmp_path / "mine"))
        assert "hand out anew: mine" in rotate(mesh, "1h")
        mesh = present(mesh)
        second = mesh.bus_token or ""
        assert second != first
        assert asyncio.run(connects(mesh, second))
        assert asyncio.run(connects(mesh, first)), "for the time of grace"
        rotate(mesh, "0s")
        assert mesh.client.job(job).state is JobState.RUNNING, "the rotations came too late"
        mesh = present(mesh)
        for old in (first, second):
            assert not asyncio.run(connects(mesh, old))
        assert asyncio.run(connects(mesh, mesh.bus_token or ""))
        record = done(mesh.client, job)
        assert record.recoveries == 0
        assert record.weights.sha256 == expected
        assert asyncio.run(look(mesh, token)) == ({"ruth", *STANDING}, {"corpus"})
        after = asyncio.run(sealed_users(mesh))
        assert after.keys() == sealed.keys()
        assert after["ruth"][:14] != sealed["ruth"][:14], "sealed to the new root's keys"
        done(mesh.client, mesh.client.submit(tiny_job("afterwards")).job)


def test_users_tokens_and_secrets_survive_rotations_of_a_mesh_that_is_stopped(tmp_path: Path) -> None:
    """Two, with no start in between: what was sealed under the first root is still opened."""
    find_binary()
    with running_mesh(tmp_path / "state", *OPTIONS) as mesh:
        token = asyncio.run(prepare(mesh))
    for grace in ("1h", "0s"):
        rotate(mesh, grace)
    old = mesh.bus_token or ""
    with running_mesh(tmp_path / "state", *OPTIONS) as mesh:
        assert asyncio.run(look(mesh, token)) == ({"ruth", *STANDING}, {"corpus"})
        assert not asyncio.run(connects(mesh, old))
        assert asyncio.run(connects(mesh, mesh.bus_token or ""))


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
        patch.setattr("dmsc.state.state_folder.write_private", write)
        with pytest.raises(KeyboardInterrupt):
            rotation.begin(folder, 60.0)
    assert count == written, "it fired"
    folder.write_tokens()
    root = folder.bus_token()
    assert root is not None
    assert (root == old) is (written < 3)
    assert folder.roots().root == root_public(root)
    assert old in folder.roots_before()
    assert rotation.begin(folder, 60.0) is False
    assert folder.bus_token() not in (None, root)
    assert folder.roots_before()[0] == root
    assert old in folder.roots_before()
