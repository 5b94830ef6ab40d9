"""A credential ends with its job, or when it is taken back: who is connected by it is out, and stays out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.guard import auth_callout
from bus.guard.auth_callout import Caller
from bus.guard.guard_keys import GuardKeys
from bus.security.credentials import Credential, delegate, issue, new_root
from bus.security.identity import Identity
from bus.server.embedded import EmbeddedServer
from bus.server.embedded_cluster import EmbeddedCluster
from dmsc.state.issued_credentials import Issued, revoke
from entities.authorizer.access.authentication import User, Users
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer
from entities.authorizer.connections.expulsions import Expulsions
from entities.authorizer.connections.job_states import JobStates
from entities.authorizer.disconnection import Disconnections
from entities.authorizer.guard_service import guarding
from entities.authorizer.service import AuthorizerConfig
from schemas.access import Revocation
from schemas.envelope import EntityKind as K
from schemas.errors import Refused
from schemas.job import JobRecord, JobSpec, JobState
from schemas.job_file.model import ModelSpec
from schemas.job_file.training import TrainingSpec
from schemas.signals import Role
from tests.integration.guard.raw_connection import RawConnection, Shut, let_in, raw_connection
from tests.patience import PATIENCE_S
from tests.waiting import eventually

SPEC = JobSpec(name="job", model=ModelSpec(factory="tiny:model"), training=TrainingSpec(steps=1))
AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")


def instance(job: str) -> Identity:
    return Identity(name=f"{job}-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job=job)


async def closed(connection: RawConnection) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while await connection.reader.readline():
                pass


async def shut(url: str, token: str, door: Any, why: str) -> None:
    """The door may say so after the server has given it up: on a busy machine it answers late."""
    with pytest.raises(Shut):
        await comes_in(url, token)
    await eventually(lambda: why in "; ".join(door.reasons))


async def is_shut(url: str, token: str) -> bool:
    try:
        await comes_in(url, token)
    except Shut:
        return True
    return False


@contextlib.asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[tuple[str, str, AuthorizerConfig]]:
    root = new_root()
    keys = GuardKeys.generate(root)
    (folder / "guard.json").write_text(keys.text())
    (folder / "users.yaml").write_text("users: []\n")
    async with EmbeddedServer(folder / "nats", guard=keys, sync_always=False) as server:
        yield (
            server.url,
            root,
            AuthorizerConfig(
                tokens_file=folder / "users.yaml",
                keys_file=folder / "guard.json",
                servers=(server.url,),
                bus_token=root,
                sid="supervisor",
                check_s=0.05,
            ),
        )


def owner(url: str, root: str) -> Any:
    return Bus.connect(
        url, name="orchestrator", kind=K.ORCHESTRATOR, token=root, connect_timeout_s=PATIENCE_S
    )


def record(job: str, state: JobState) -> JobRecord:
    return JobRecord(job=job, spec=SPEC, state=state, submitted_at=1.0, changed_at=1.0)


async def test_a_credential_that_is_taken_back_ends_with_all_that_it_signed(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    async with mesh(tmp_path) as (url, root, config):
        agent, other = issue(root, AGENT), issue(root, AGENT)
        issued.add(Credential.parse(agent), 1.0)
        theirs = delegate(agent, instance("j")) or ""
        async with guarding(config) as door:
            async with owner(url, root) as bus:
                await bus.provision()
                await bus.bucket(subjects.JOB_RECORD).put(record("j", JobState.RUNNING), job="j")
            async with (
                let_in(url, agent) as one,
                let_in(url, theirs) as two,
                let_in(url, other) as bystander,
            ):
                await revoke([url], root, issued.ids_of(Credential.parse(agent).id), issued, "sold")
                await closed(one)
                await closed(two)
                await bystander.until_pong()
            id = Credential.parse(agent).id
            await shut(url, agent, door, f"credential {id}, by which a-n comes, was revoked by owner: sold")
            await shut(url, theirs, door, f"credential {id}, by which j-s0-r0 comes, was revoked by owner")
        assert [(one.id, one.state(2.0)) for one in issued.all()] == [(id, "revoked")]
        async with guarding(config) as door:  # another guard lets nobody in before it has read that
            while not any("was revoked" in reason for reason in door.reasons):
                with pytest.raises(Shut):
                    await comes_in(url, agent)
            async with let_in(url, other) as bystander:
                await bystander.until_pong()


async def test_only_an_authorizer_comes_in_before_a_guard_has_read_what_was_revoked(tmp_path: Path) -> None:
    keys, root = guard_keys()
    read = asyncio.Event()
    async with EmbeddedServer(tmp_path / "nats", guard=keys, sync_always=False) as server:
        user, token = users_token()
        door = ConnectionAuthorizer(keys, lambda: Users(listed=(user,)), revocations_read=read)
        async with door.answering([server.url], "anew"):
            for early in (token, issue(root, AGENT), issue(root, Identity(name="gateway-a", kind=K.GATEWAY))):
                await shut(server.url, early, door, "waits until what was revoked is known here")
            async with let_in(server.url, issue(root, Identity(name="authorizer", kind=K.AUTHORIZER))) as one:
                await one.until_pong()
            waiting = asyncio.create_task(comes_in(server.url, token))
            read.set()
            await waiting
            assert not door.granted[K.CLUSTER]


async def comes_in(url: str, token: str) -> None:
    async with raw_connection(url, token) as one:
        await one.until_pong()


def guard_keys() -> tuple[GuardKeys, str]:
    root = new_root()
    return GuardKeys.generate(root), root


def users_token() -> tuple[User, str]:
    digest = hashlib.sha256(b"a-token-of-ruth").hexdigest()
    return User(name="ruth", role=Role.RESEARCHER, token_sha256=digest), "a-token-of-ruth"


class Counting(Disconnections):
    """Tells of each time that not every server answered."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.failed = asyncio.Event()

    async def disconnect_credential(self, id: str) -> int | None:
        ended = await super().disconnect_credential(id)
        if ended is None:
            self.failed.set()
        return ended


async def test_a_server_that_stands_still_ends_the_connection_once_it_goes_on(tmp_path: Path) -> None:
    keys, root = guard_keys()
    agent = issue(root, AGENT)
    async with EmbeddedCluster(tmp_path / "nats", size=3, guard=keys, sync_always=False) as cluster:
        first, second, _ = cluster.servers
        door = ConnectionAuthorizer(keys, Users)
        evictions, jobs = Counting([first.url], keys), JobStates()
        expulsions = Expulsions(evictions, jobs)
        async with (
            door.answering([first.url], "one"),
            expulsions.carried_out(),
            asyncio.timeout(PATIENCE_S),
            let_in(second.url, agent) as there,
        ):
            os.kill(second.pid, signal.SIGSTOP)
            try:
                expulsions.revoked(
                    Revocation(
                        kind="credential", id=Credential.parse(agent).id, user="a-n", at=1.0, by="owner"
                    )
                )
                await evictions.failed.wait()
            finally:
                os.kill(second.pid, signal.SIGCONT)
            await closed(there)


async def test_an_instances_credential_ends_with_its_job(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (url, root, config):
        agent = issue(root, AGENT)
        ended, running = (delegate(agent, instance(job)) or "" for job in ("j1", "j2"))
        async with guarding(config) as door, owner(url, root) as bus:
            await bus.provision()
            jobs = bus.bucket(subjects.JOB_RECORD)
            for job in ("j1", "j2"):
                await jobs.put(record(job, JobState.RUNNING), job=job)
            async with (
                let_in(url, ended) as one,
                let_in(url, running) as two,
                let_in(url, agent) as node,
            ):
                await jobs.put(record("j1", JobState.DONE), job="j1")
                await closed(one)
                await two.until_pong()
                await node.until_pong()
            await shut(url, ended, door, "the job of j1-s0-r0 has ended, and its credentials with it")
            async with let_in(url, running) as two:
                await two.until_pong()


async def test_an_instance_comes_in_with_the_record_of_its_job(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (url, root, config):
        agent = issue(root, AGENT)
        token, forged = (delegate(agent, instance(job)) or "" for job in ("j1", "never"))
        async with guarding(config) as door, owner(url, root) as bus:
            await bus.provision()
            await shut(url, forged, door, "no record of the job of never-s0-r0 is known here")
            coming = asyncio.create_task(connected(url, token, "j1"))
            await bus.bucket(subjects.JOB_RECORD).put(record("j1", JobState.QUEUED), job="j1")
            await coming
            await bus.bucket(subjects.JOB_RECORD).delete(job="j1")
            await eventually(lambda: is_shut(url, token))  # the door hears of it on another connection
            await shut(url, token, door, "no record of the job of j1-s0-r0 is known here")


async def connected(url: str, token: str, job: str) -> None:
    """Returns once an instance of the job was let in."""
    async with Bus.connect(
        url, name=f"{job}-s0-r0", kind=K.INSTANCE, token=token, connect_timeout_s=PATIENCE_S
    ) as bus:
        await bus.barrier()


class Late(ConnectionAuthorizer):
    """`left`: somebody was left without an answer."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.left = asyncio.Event()

    def left_out(self, caller: Caller, error: Refused) -> None:
        super().left_out(caller, error)
        self.left.set()


async def test_an_instance_comes_back_to_an_authorizer_that_has_yet_to_read_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authorizer is started anew while a job recovers, and the job's instance loses its connection."""
    monkeypatch.setattr(auth_callout, "CALLOUT_HELD_S", 0.05)
    async with mesh(tmp_path) as (url, root, config), AsyncExitStack() as stack:
        keys = GuardKeys.read(tmp_path / "guard.json")
        async with guarding(config):
            bus = await stack.enter_async_context(owner(url, root))
            await bus.provision()
            await bus.bucket(subjects.JOB_RECORD).put(record("j1", JobState.RECOVERING), job="j1")
            token = delegate(issue(root, AGENT), instance("j1")) or ""
            lost = await stack.enter_async_context(
                Bus.connect(url, name="j1-s0-r0", kind=K.INSTANCE, token=token, connect_timeout_s=PATIENCE_S)
            )
        jobs = JobStates()
        door = Late(keys, Users, jobs=jobs)
        async with door.answering([url], "anew"), asyncio.timeout(PATIENCE_S):
            back = lost.connection.back
            await Disconnections([url], keys, name="anew").disconnect_credential(Credential.parse(token).id)
            await door.left.wait()
            assert not lost.connected
            assert "no record of the job of j1-s0-r0 is known here" in door.reasons
            await jobs.start(bus)
            await back
            await lost.barrier()
            await jobs.stop()


def test_what_was_made_is_listed_and_found_by_id_or_name(tmp_path: Path) -> None:
    issued, made = Issued(tmp_path), Credential.parse(issue(new_root(), AGENT))
    issued.add(made, 1.0)
    assert issued.ids_of("a-n") == issued.ids_of(made.id) == [made.id]
    assert issued.ids_of("0" * 12) == ["0" * 12]
    with pytest.raises(Exception, match="no credential 'b-n' was made here"):
        issued.ids_of("b-n")
    text = (tmp_path / "credentials.jsonl").read_text()
    assert made.text not in text
    assert made.keys.seed not in text
    assert (tmp_path / "credentials.jsonl").stat().st_mode & 0o077 == 0
