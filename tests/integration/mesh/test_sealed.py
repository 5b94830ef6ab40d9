"""What an operator's plain NATS client sees of a mesh at work, and what the server stores: not one secret.

The listeners hear everything, inboxes included, and read every stream and bucket; what the server wrote to
its disk is searched, too, so that nothing depends on who may read what.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from nats.aio.msg import Msg

from bus import subjects
from bus.connection import Bus
from bus.security.credentials import issue
from bus.security.identity import Identity
from bus.server.embedded import find_binary
from dmsc.client.async_client import AsyncClient
from dmsc.client.client import Client
from entities.orchestrator.job_state.link_secret import link_secret
from schemas.envelope import EntityKind as K
from schemas.errors import DmscError
from schemas.gateway_api import DoorRequest, JobList
from schemas.job import JobState
from tests.integration.dmsc.command_line import dmsc
from tests.integration.mesh.conftest import Mesh, done, outcome, running_mesh
from tests.integration.mesh.user_jobs import held_job, hold, user_job, words
from tests.patience import PATIENCE_S

SPOKEN = (subjects.ACCESS, subjects.USER_COMMAND, subjects.START_INSTANCE, subjects.DOOR, subjects.SUBMIT)
"""Rows whose messages must have been heard: they are where secrets were."""


@dataclass
class Heard:
    """All that a subscription to `>` brought."""

    messages: list[Msg] = field(default_factory=list)

    async def take(self, message: Msg) -> None:
        self.messages.append(message)

    @property
    def bytes(self) -> bytes:
        parts = []
        for message in self.messages:
            head = "\n".join(f"{key}: {value}" for key, value in (message.headers or {}).items())
            parts.append(f"{message.subject} {message.reply}\n{head}\n".encode() + message.data)
        return b"\n".join(parts)


@contextlib.asynccontextmanager
async def listening(mesh: Mesh, token: str, name: str) -> AsyncIterator[tuple[Bus, Heard]]:
    heard = Heard()
    async with mesh.bus(name, K.TAP, token=token, connect_timeout_s=PATIENCE_S) as bus:
        await bus.raw.subscribe(">", cb=heard.take)
        await bus.barrier()
        yield bus, heard


async def stored(bus: Bus) -> bytes:
    """What every bucket and stream holds, as far as this identity may read it."""
    found = []
    for row in subjects.SUBJECTS:
        with contextlib.suppress(DmscError):
            if row.bucket is not None:
                found += [repr(entry.message).encode() for entry in await bus.bucket(row).entries()]
            elif row.stream is not None:
                found += [repr(item.message).encode() async for item in bus.history(row)]
    return b"\n".join(found)


def kept_by_the_server(state: Path, stream: str = "") -> bytes:
    return b"".join(path.read_bytes() for path in (state / "nats").rglob("*.blk") if stream in str(path))


async def at_the_nats_door(mesh: Mesh, token: str) -> str:
    """A user's own client asks over NATS, without knowing any key beforehand."""
    async with mesh.bus("script", token=token, connect_timeout_s=PATIENCE_S) as bus:
        request = DoorRequest(token=token, action="job.list")
        answer = await bus.command(subjects.DOOR, request, deadline_s=PATIENCE_S, action="job-list")
        assert isinstance(answer, JobList)
        return token


async def secrets_of_job(mesh: Mesh, job: str) -> str:
    token = issue(mesh.bus_token or "", Identity(name="orchestrator", kind=K.ORCHESTRATOR))
    credential = {"token": token, "connect_timeout_s": PATIENCE_S}
    async with mesh.bus("orchestrator", K.ORCHESTRATOR, **credential) as bus:
        return await link_secret(bus, job)


async def work(mesh: Mesh, folder: Path) -> dict[str, str]:
    """Everything that hands secrets about: users made, tokens issued and shown, a job with tensor links."""
    ask = asyncio.to_thread
    made: dict[str, str] = {}
    async with AsyncClient(state=mesh.state) as admin:
        for name, role in (("ruth", "researcher"), ("ada", "admin")):
            made[f"{name}'s token"] = (await admin.add_user(name, role)).token or ""
        made["ruth's second token"] = (await admin.issue_token("ruth")).token or ""
        assert {user.name for user in await admin.users()} >= {"ruth", "ada"}
    with Client(state=mesh.state, token=made["ruth's token"]) as ruth:
        await at_the_nats_door(mesh, made["ruth's second token"])
        gate, data = folder / "gate", words(folder)
        made["a stored secret"] = "planted-password-of-the-corpus"
        stored = await asyncio.to_thread(
            dmsc,
            *("secret", "set", "corpus", "--from-env", "CORPUS"),
            cwd=folder,
            CORPUS=f"local://{data}#password={made['a stored secret']}",
            DMSC_TOKEN=made["ruth's token"],
            DMSC_GATEWAY=",".join(json.loads((mesh.state / "mesh.json").read_text())["gateways"].values()),
        )
        assert stored.returncode == 0, stored.stderr
        planted = made["a secret in a job's URL"] = "planted-secret-of-the-store"
        source = {"source": f"local://{data}#secret={planted}"}
        spec = held_job(data, gate, data=source, parallel={"stages": 2})
        job = await ask(hold, ruth, spec, gate)
        made["the link secret"] = await secrets_of_job(mesh, job)
        gate.unlink()
        record = await ask(done, ruth, job)
        assert record.spec.data.source.startswith("secret://ruth/generated-")
        named = user_job("sound", data, data={"source": "secret://corpus"})
        record = await ask(lambda: done(ruth, ruth.submit(named).job))
        assert record.spec.data.source == "secret://ruth/corpus"
        async with AsyncClient(state=mesh.state, token=made["ruth's token"]) as client:
            made["a secret for a model"] = "planted-token-of-the-hub"
            await client.set_secret("hub", made["a secret for a model"])
        made |= await ask(with_secret_arguments, ruth, data, made["a secret for a model"])
    return made


def with_secret_arguments(ruth: Client, data: Path, named: str) -> dict[str, str]:
    """A model is given a token by name, and another one in the clear, which it says in its error."""
    plain = "planted-token-in-an-argument"
    args = {"api_token": "secret://hub", "sha256": hashlib.sha256(named.encode()).hexdigest()}
    job = ruth.submit(user_job("fetching", data, model={"args": args})).job
    record = done(ruth, job)
    assert record.spec.model.args == args | {"api_token": "secret://ruth/hub"}
    record = outcome(ruth, user_job("fetching", data, model={"args": args | {"api_token": plain}}))
    assert record.state is JobState.FAILED
    assert "the hub refuses secret://ruth/generated-" in record.reason
    return {"a secret in an argument": plain}


async def observed(mesh: Mesh, folder: Path) -> tuple[dict[str, str], dict[str, bytes], set[str]]:
    async with AsyncClient(state=mesh.state) as admin:
        operator = (await admin.add_user("olga", "operator")).token or ""
    async with (
        listening(mesh, operator, "olga") as (bus, heard),
        listening(mesh, mesh.bus_token or "", "owner") as (_, all_heard),
    ):
        secrets = await work(mesh, folder)
        await bus.barrier()
        rows = {
            row.name
            for one in all_heard.messages
            if (found := subjects.lookup(one.subject))
            for row in found[:1]
        }
        seen = {
            "what an operator hears": heard.bytes,
            "what an operator reads": await stored(bus),
            "what is said at all": all_heard.bytes,
        }
        assert len(heard.messages) > 100
    return secrets, seen, rows


def test_no_secret_is_said_or_stored_in_the_clear(tmp_path: Path) -> None:
    find_binary()
    with running_mesh(tmp_path / "state", "--cluster", "a", "--slots", "2") as mesh:
        secrets, seen, rows = asyncio.run(observed(mesh, tmp_path))
        secrets |= {
            "the administrator's token": mesh.token,
            "the root": mesh.bus_token or "",
            "the key of users' tokens": (mesh.state / "user_key").read_text().strip(),
        }
        assert "; as authorizer kept it up to " in mesh.printed("audit", "verify")
    seen["what the server stores"] = kept_by_the_server(mesh.state)
    assert {row.name for row in SPOKEN} <= rows
    assert all(len(data) > 10_000 for data in seen.values()), {name: len(data) for name, data in seen.items()}
    assert all(len(secret) > 20 for secret in secrets.values())
    found = [
        f"{name} in {where}"
        for where, data in seen.items()
        for name, secret in secrets.items()
        for form in (secret.encode(), secret.rpartition(".")[2].encode())
        if form in data
    ]
    assert found == []
    users = kept_by_the_server(mesh.state, "KV_users")  # who may do what is the authorizers' affair
    assert b"$KV.users.ruth" in users
    assert b"researcher" not in users
