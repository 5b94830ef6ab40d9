"""A mesh over TLS that trains, is tapped and recorded: no secret of it is anywhere but where it belongs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bus import subjects
from bus.nats import tls_trust
from bus.server.embedded import find_binary
from schemas.cluster import LinkSecret
from schemas.envelope import EntityKind
from tests.integration.dmsc.command_line import dmsc, running
from tests.integration.mesh.conftest import Mesh, done, processes_of, running_mesh
from tests.integration.mesh.user_jobs import held_job, hold, words
from tests.patience import PATIENCE_S

PLANTED = {
    "token": "planted-user-token-7f3a",
    "bus_token": "dmsc:planted-bus-token-91c2",
    "user_key": "c0ffee" * 10 + "abcd",
}
"""Put into the state folder before the mesh starts, which keeps what is there."""

BELONGS = ("token", "bus_token", "user_key", "nats/server.conf", "tls/server-key.pem", "tls/ca-key.pem")
"""Files that hold a secret, on purpose: all of them with mode 0600."""

BUCKET = "KV_link_secrets"
"""The server's store of the orchestrators' bucket."""


async def link_secret(mesh: Mesh, job: str) -> str:
    """The job's, as its orchestrator keeps it."""
    async with mesh.bus("looker", EntityKind.ORCHESTRATOR) as bus, asyncio.timeout(PATIENCE_S):
        while True:
            entry = await bus.bucket(subjects.LINK_SECRET).get(job=job)
            if entry is not None and isinstance(entry.message, LinkSecret):
                return entry.message.secret
            await asyncio.sleep(0.05)


def holders(folder: Path, secrets: dict[str, bytes]) -> list[str]:
    """Which secret is in which file that it does not belong into."""
    found = []
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if not path.is_file() or name in BELONGS or BUCKET in name:
            continue
        content = path.read_bytes()
        found += [f"{secret} in {name}" for secret, value in secrets.items() if value in content]
    return found


def test_no_planted_secret_is_found_where_it_does_not_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tls_trust.VARIABLE, raising=False)
    find_binary()
    state, outside = tmp_path / "state", tmp_path / "outside"
    state.mkdir()
    outside.mkdir()
    for name, value in PLANTED.items():
        (state / name).touch(mode=0o600)
        (state / name).write_text(value + "\n")
    with running_mesh(state, "--tls", "--cluster", "a", "--slots", "2") as mesh:
        assert mesh.servers[0].startswith("tls://")
        user_token = json.loads(mesh.printed("user", "add", "ruth", "--json", cwd=outside))["token"]
        secrets = {
            "administrator's token": PLANTED["token"],
            "bus token": PLANTED["bus_token"].partition(":")[2],
            "key of tokens": PLANTED["user_key"],
            "user's token": user_token,
        }
        recording = outside / "tapped.rec"
        with running("tap", ">", "--record", str(recording), "--state", str(state), cwd=outside) as tap:
            tap.until(lambda text: bool(text.strip()))  # somebody's heartbeat: it listens
            gate = outside / "gate"  # its instances are there while we look
            job = hold(mesh.client, held_job(words(outside), gate, parallel={"stages": 2}), gate)
            secrets["job's link secret"] = asyncio.run(link_secret(mesh, job))
            wrong = mesh.dmsc("jobs", "--token", user_token + "x", cwd=outside)
            assert wrong.returncode == 4, wrong.stderr
            assert wrong.stderr.count("\n") == 1
            (outside / "error.txt").write_text(wrong.stderr + wrong.stdout)
            lines = processes_of(mesh.process.pid)
            gate.unlink()
            done(mesh.client, job)
            tap.interrupt()
            tap.wait()
        assert recording.stat().st_size > 10_000
        mesh.client.download_weights(job, outside / "weights")
        mesh.printed("runs", "export", job, str(outside / "run.rec"), cwd=outside)
        mesh.printed("audit", "export", str(outside / "audit.ndjson"), cwd=outside)
        holding = dmsc("audit", "verify", str(outside / "audit.ndjson"), cwd=outside)
        assert holding.returncode == 0, holding.stderr
    sought = {name: value.encode() for name, value in secrets.items()}
    assert len(lines) > 4
    own = [
        line for line in lines.values() if "workers.process.fork_server" in line or line.startswith("dmsc ")
    ]
    assert len(own) > 3, "the job's instances, too"
    assert not [
        f"{name} in the command line of {pid}"
        for pid, line in lines.items()
        for name, value in secrets.items()
        if value in line
    ]
    assert holders(state, sought) == []
    assert holders(outside, sought) == []
    said = state.with_name(f"{state.name}.stderr").read_bytes()
    assert not [name for name, value in sought.items() if value in said]
    for name in BELONGS:
        assert (state / name).stat().st_mode & 0o077 == 0, name
