"""Two tenants on one server (ADR-0028): nothing of one exists for the other."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bus import subjects
from bus.connection import Bus
from bus.guard.accounts import AccountLimits, NatsAccount, account_of, least_store_bytes
from bus.guard.broker_caller import BELOW, callers_of_role
from bus.guard.connection_admin import ConnectionAdmin
from bus.guard.guard_keys import GuardKeys
from bus.messaging import rendezvous
from bus.messaging.disconnects import subscribe_disconnects
from bus.messaging.streams import stream_configs
from bus.nats import jetstream
from bus.nats.reply_subjects import inbox_of_token
from bus.security.credentials import Credential, issue, new_root
from bus.security.identity import Identity
from bus.server.embedded import EmbeddedServer
from bus.subjects import SUBJECTS
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.authorizer.tenant_guard import Tenant, TenantGuard, guarding_tenants
from entities.service_registry.service import ServiceRegistry
from schemas.access import UserAnswer, UserCommand
from schemas.cluster import LinkSecret
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope
from schemas.errors import BadInput, DmscError, NoResponders, Refused, Unavailable
from schemas.job import JobEvent
from schemas.registry import Resolve, Resolved
from schemas.signals import Role
from tests.integration.guard.raw_connection import RawConnection, Shut, raw_connection
from tests.patience import PATIENCE_S

NAMES = ("red", "blue")
OF_BOTH = "a token that users of both have"
CONNECTIONS = 12
MIB = 1 << 20
NOBODYS = {
    "$JS.EVENT.ADVISORY.x",
    "$JS.ACK.x",
    "_INBOX.x.1",
    "dmsc.server.disconnect",
    "dmsc.v1.broker.x.x.x",
    "anything.else",
}
"""What no credential and no user may say."""
EVENT = JobEvent(job="j", kind="state", at=0.0)
SRD = Identity(name="service-registry", kind=K.SERVICE_REGISTRY)
SMO = Identity(name="orchestrator", kind=K.ORCHESTRATOR)


@dataclass
class Side:
    """One tenant's own: its root, and the folder with its users."""

    name: str
    root: str
    folder: Path

    @property
    def account(self) -> str:
        return account_of(self.name)

    def token(self, role: Role) -> str:
        """Of a user whom both tenants have by this name, each with a token of its own."""
        return f"{self.name}'s {role}"

    def config(self, sid: str = "authorizer") -> AuthorizerConfig:
        return AuthorizerConfig(
            sid=sid,
            tokens_file=self.folder / "tokens.yaml",
            user_key=self.folder / "user_key",
            bus_token=self.root,
            check_s=0.05,
        )


@dataclass
class Shared:
    """A server of two tenants, with streams and buckets in both accounts."""

    server: EmbeddedServer
    keys: GuardKeys
    guard: TenantGuard
    red: Side
    blue: Side

    def bus(self, side: Side, who: Identity = SMO, token: str | None = None) -> Any:
        token = issue(side.root, who) if token is None else token
        return Bus.connect(
            self.server.url, name=who.name, kind=who.kind, token=token, connect_timeout_s=PATIENCE_S
        )

    async def count(self, side: Side, name: str) -> int:
        """How many connections `name` has in the account of `side`, as the server says."""
        async with ConnectionAdmin.open([self.server.url], self.keys, name="test") as connections:
            return len(await connections.of(lambda as_: as_.partition("/")[0] == name, side.account))


def make_side(folder: Path, name: str) -> Side:
    side = Side(name, new_root(), folder / name)
    side.folder.mkdir()
    lines = [
        f"  - {{name: {role}-one, role: {role}, token_sha256: {_digest(side.token(role))}}}" for role in Role
    ]
    lines.append(f"  - {{name: twin, role: admin, token_sha256: {_digest(OF_BOTH)}}}")
    (side.folder / "tokens.yaml").write_text("\n".join(["users:", *lines]) + "\n")
    key = side.folder / "user_key"
    key.write_text(hashlib.sha256(name.encode()).hexdigest())
    key.chmod(0o600)
    return side


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.asynccontextmanager
async def sharing(folder: Path, store_bytes: int) -> AsyncIterator[Shared]:
    """`store_bytes`: of each tenant."""
    sides = [make_side(folder, name) for name in NAMES]
    keys = GuardKeys.generate(None)
    limits = AccountLimits(store_bytes=store_bytes, memory_bytes=32 << 20, connections=CONNECTIONS)
    server = EmbeddedServer(
        folder / "nats",
        guard=keys,
        sync_always=False,
        accounts=[NatsAccount(name=side.account, limits=limits) for side in sides],
        max_store_bytes=2 * limits.store_bytes,
        max_memory_bytes=2 * limits.memory_bytes,
    )
    async with server:
        tenants = [Tenant(account=side.account, users=_at(server, side)) for side in sides]
        async with guarding_tenants([server.url], keys, tenants) as guard:
            yield Shared(server, keys, guard, *sides)


@pytest_asyncio.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    """With streams and buckets in both accounts."""
    async with sharing(tmp_path, least_store_bytes()) as found:
        for side in (found.red, found.blue):
            async with found.bus(side) as bus:
                await bus.provision()
        yield found


def _at(server: EmbeddedServer, side: Side) -> AuthorizerConfig:
    return replace(side.config("guard"), servers=(server.url,))


async def heard(connection: RawConnection) -> list[str]:
    """Subjects of the messages that came in up to now."""
    return [line.split()[1].decode() for line in await connection.until_pong() if line.startswith(b"MSG ")]


def everything(inbox: str) -> Iterable[str]:
    """A subject of each row, and what JetStream, buckets, objects and inboxes speak on. `inbox`: of the
    administrator who asks a broker."""
    for row in SUBJECTS:
        if row is not subjects.BROKER_REQUEST:
            yield row(**dict.fromkeys(row.tokens, "x"))
    yield from (asker.subject for asker in callers_of_role(Role.ADMIN, inbox))
    yield from (pattern.replace("*", "x").replace(">", "x") for pattern in rendezvous.subjects_of(None))
    yield from (
        "$O.artifacts.C.x.x",
        "$O.artifacts.M.x",
        "_INBOX.x.x.1.gateway.x.1",
        "_INBOX.x.x.1.orchestrator._.1",
        "$JS.API.STREAM.NAMES",
    )


async def speakers(shared: Shared, side: Side) -> AsyncIterator[RawConnection]:
    """An administrator, and each kind of the control plane, one after the other."""
    async with raw_connection(shared.server.url, side.token(Role.ADMIN)) as admin:
        yield admin
    for kind in K:
        if kind not in BELOW:
            token = issue(side.root, Identity(name="x", kind=kind))
            async with raw_connection(shared.server.url, token, "x", kind) as one:
                yield one


async def test_no_subject_of_one_is_heard_by_the_other(shared: Shared) -> None:
    tap = Identity(name="tap", kind=K.TAP)
    for here, there in ((shared.red, shared.blue), (shared.blue, shared.red)):
        async with AsyncExitStack() as stack:
            inside, outside = [
                await stack.enter_async_context(
                    raw_connection(shared.server.url, issue(side.root, tap), "tap", K.TAP)
                )
                for side in (here, there)
            ]
            for ear in (inside, outside):
                ear.writer.write(b"SUB > 1\r\n")
                await ear.until_pong()
            said = set(everything(inbox_of_token(here.token(Role.ADMIN))))
            unsaid = said | NOBODYS
            async for speaker in speakers(shared, here):
                unsaid = await speaker.denied(publish=unsaid)
            assert unsaid == NOBODYS
            assert set(await heard(inside)) >= said, "all of it is heard at home"
            assert not set(await heard(outside)) & said


async def test_nobody_answers_across(shared: Shared) -> None:
    async def serve(message: Resolve, envelope: Envelope) -> Resolved:
        return Resolved(revision=1, records=())

    async with shared.bus(shared.red, SRD) as registry, shared.bus(shared.red) as red:
        serving = await registry.serve(subjects.RESOLVE, serve)
        assert isinstance(await red.request(subjects.RESOLVE, Resolve(), timeout_s=PATIENCE_S), Resolved)
        async with shared.bus(shared.blue) as blue:
            with pytest.raises(NoResponders):
                await blue.request(subjects.RESOLVE, Resolve(), timeout_s=PATIENCE_S)
        await serving.stop()


async def test_the_same_names_in_both_are_two_things(shared: Shared) -> None:
    """Buckets, compare-and-set, streams, objects: the same job, the same SIDs, connected at once."""
    async with shared.bus(shared.red) as red, shared.bus(shared.blue) as blue:
        for bus, secret in ((red, "one"), (blue, "other")):
            found = bus.bucket(subjects.LINK_SECRET)
            assert await found.create(LinkSecret(job="j", secret=secret), job="j"), "a conflict, were it one"
        for bus, secret in ((red, "one"), (blue, "other")):
            entry = await bus.bucket(subjects.LINK_SECRET).get(job="j")
            assert entry is not None
            assert entry.message.secret == secret
        for bus, name in ((red, b"red"), (blue, b"blue")):
            await bus.objects.put("weights", name)
        for bus, name in ((red, b"red"), (blue, b"blue")):
            assert b"".join([piece async for piece in bus.objects.get("weights")]) == name
        await red.objects.put("more", b"of red alone")
        assert [each.name for each in await blue.objects.list()] == ["weights"]
        await red.append(subjects.JOB_EVENT, EVENT, job="j")
        assert len([one async for one in red.history(subjects.JOB_EVENT)]) == 1
        assert not [one async for one in blue.history(subjects.JOB_EVENT)]


async def test_a_credential_and_a_token_count_at_home_alone(shared: Shared) -> None:
    for here, there in ((shared.red, shared.blue), (shared.blue, shared.red)):
        async with shared.bus(here), raw_connection(shared.server.url, here.token(Role.VIEWER)):
            assert await shared.count(here, "orchestrator") == 1
            assert await shared.count(here, "user:viewer-one") == 1
            assert await shared.count(there, "orchestrator") == 0
            assert await shared.count(there, "user:viewer-one") == 0


async def test_who_belongs_to_none_or_to_two_is_refused(shared: Shared) -> None:
    stranger = issue(new_root(), SMO)
    of_red = Credential.parse(issue(shared.red.root, SMO))
    of_blue = Credential.parse(issue(shared.blue.root, SMO))
    mixed = Credential((*of_red.chain, *of_blue.chain), of_blue.keys).text
    stolen = Credential(of_red.chain, of_blue.keys)
    for token in (stranger, mixed, "nobody's token", OF_BOTH, "eyJ.eyJ.x"):
        with pytest.raises(Shut):
            async with raw_connection(shared.server.url, token, "orchestrator", K.ORCHESTRATOR):
                pass
    options: dict[str, Any] = {"auth_token": stolen.chain[0]}
    with pytest.raises(Shut):
        async with raw_connection(shared.server.url, of_blue.text, "orchestrator", K.ORCHESTRATOR, **options):
            pass


async def test_a_copied_folder_is_not_two_tenants(shared: Shared) -> None:
    twice = [
        Tenant(account=account, users=_at(shared.server, shared.red))
        for account in ("tenant-red", "tenant-b")
    ]
    with pytest.raises(BadInput, match="have the same root"):
        async with guarding_tenants([shared.server.url], shared.keys, twice):
            pass


async def test_a_tenant_adds_and_revokes_its_own_users_at_the_bus(shared: Shared) -> None:
    aam = Identity(name="authorizer", kind=K.AUTHORIZER)
    gateway = Identity(name="gateway-a", kind=K.GATEWAY, cluster="a")
    async with AsyncExitStack() as stack:
        tokens = {}
        buses, aams = {}, {}
        for side in (shared.red, shared.blue):
            registry = ServiceRegistry(await stack.enter_async_context(shared.bus(side, SRD)))
            await started(stack, registry)
            aams[side.name] = await stack.enter_async_context(shared.bus(side, aam))
            await started(stack, Authorizer(aams[side.name], side.config()))
            buses[side.name] = await stack.enter_async_context(shared.bus(side, gateway))
            tokens[side.name] = (await command(buses[side.name], side, "add", role="viewer")).token
        lines = {}
        for side in (shared.red, shared.blue):
            lines[side.name] = await let_in(stack, shared, tokens[side.name])
            assert await shared.count(side, "user:ruth") == 1
        with pytest.raises(Refused):
            await command(buses["blue"], shared.red, "list")
        await command(buses["red"], shared.red, "revoke")
        async with asyncio.timeout(PATIENCE_S):
            while await lines["red"].reader.readline():
                pass  # up to the end of the connection, which the server makes
        await lines["blue"].until_pong()  # a namesake, who stays
        with pytest.raises(Shut):
            async with raw_connection(shared.server.url, tokens["red"]):
                pass
        async with asyncio.timeout(PATIENCE_S):
            trail = aams["red"].history(subjects.AUDIT, follow=True)
            async with contextlib.aclosing(trail) as coming:
                revoked = (said async for one in coming if "was revoked" in (said := one.message).reason)
                told = await anext(revoked)
        assert (told.kind, told.user, told.resource) == ("connection", "ruth", "wire from 127.0.0.1")
        theirs = [one.message async for one in aams["blue"].history(subjects.AUDIT)]
        assert not any("was revoked" in each.reason for each in theirs)


async def test_a_tenant_that_is_full_leaves_the_other_its_share(tmp_path: Path) -> None:
    objects, jobs = (
        next(each for each in stream_configs(1) if each["name"] == name) for name in ("OBJ_artifacts", "JOBS")
    )
    async with sharing(tmp_path, 8 * MIB) as found:
        async with found.bus(found.red) as red, found.bus(found.blue) as blue:
            for bus in (red, blue):
                await jetstream.call(bus.connection, "STREAM.CREATE.OBJ_artifacts", objects)
            await red.objects.put("fits", bytes(4 * MIB))
            with pytest.raises(DmscError):
                await red.objects.put("does-not", bytes(8 * MIB))
            await blue.objects.put("weights", bytes(6 * MIB))
            with pytest.raises(Unavailable):  # nor can it reserve what it does not have
                await jetstream.call(red.connection, "STREAM.CREATE.JOBS", jobs)
        await found.server.restart()
        async with found.bus(found.red) as red, found.bus(found.blue) as blue:
            assert [each.name for each in await red.objects.list()] == ["fits"]
            assert [each.name for each in await blue.objects.list()] == ["weights"]


async def test_a_crowd_of_one_tenants_leaves_the_others_door_open(shared: Shared) -> None:
    async with AsyncExitStack() as stack:

        async def another(side: Side) -> None:
            token = issue(side.root, SMO)
            await stack.enter_async_context(
                raw_connection(shared.server.url, token, "orchestrator", K.ORCHESTRATOR)
            )

        refused = False
        for _ in range(CONNECTIONS + 1):
            try:
                await another(shared.red)
            except Shut:
                refused = True
                break
        assert refused
        await another(shared.blue)


async def test_each_hears_of_its_own_departures(shared: Shared) -> None:
    gone: dict[str, asyncio.Queue[str]] = {name: asyncio.Queue() for name in NAMES}
    async with shared.bus(shared.red, SRD) as red, shared.bus(shared.blue, SRD) as blue:
        for name, bus in (("red", red), ("blue", blue)):
            queue = gone[name]
            await subscribe_disconnects(bus, lambda who, why, queue=queue: queue.put_nowait(who))
        async with raw_connection(shared.server.url, issue(shared.red.root, SMO), "of-red", K.ORCHESTRATOR):
            pass
        async with asyncio.timeout(PATIENCE_S):
            while await gone["red"].get() != "of-red/0":
                pass
            async with raw_connection(
                shared.server.url, issue(shared.blue.root, SMO), "of-blue", K.ORCHESTRATOR
            ):
                pass
            while (name := await gone["blue"].get()) != "of-blue/0":
                assert name != "of-red/0"


async def test_nobody_of_a_tenant_asks_the_server_about_anybody(shared: Shared) -> None:
    asked = {
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        "$JS.tenant-blue.API.INFO",
        "$JS.blue.API.STREAM.NAMES",
        "$SYS.REQ.SERVER.PING",
        "$SYS.REQ.SERVER.PING.CONNZ",
        "$SYS.REQ.SERVER.PING.JSZ",
        "$SYS.REQ.ACCOUNT.tenant-blue.INFO",
        "$SYS.REQ.ACCOUNT.tenant-blue.CONNZ",
        "$SYS.REQ.USER.AUTH",
        "$SYS.REQ.ACCOUNT.PING.CONNZ",
        "$SYS.REQ.ACCOUNT.PING.INFO",
    }
    async for speaker in speakers(shared, shared.red):
        # a control plane makes streams, those of its own account
        assert await speaker.denied(publish=asked) >= asked - {"$JS.API.STREAM.NAMES"}


async def command(bus: Bus, side: Side, op: Any, **more: Any) -> UserAnswer:
    message = UserCommand(token=side.token(Role.ADMIN), gateway="gateway-a", op=op, name="ruth", **more)
    answer = await bus.request(subjects.USER_COMMAND, message, timeout_s=PATIENCE_S, gateway="gateway-a")
    assert isinstance(answer, UserAnswer)
    return answer


async def let_in(stack: AsyncExitStack, shared: Shared, token: str | None) -> RawConnection:
    """Once the guard has heard of the new user."""
    assert token is not None
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await stack.enter_async_context(raw_connection(shared.server.url, token))
            except Shut:
                await asyncio.sleep(0.05)


async def started(stack: AsyncExitStack, service: Authorizer | ServiceRegistry) -> None:
    """Once it serves; ended with the stack."""
    ready = asyncio.Event()
    task = asyncio.create_task(service.run(ready))

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    await asyncio.wait_for(ready.wait(), PATIENCE_S)
