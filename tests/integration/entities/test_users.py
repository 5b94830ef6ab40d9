"""Users with tokens that expire, revocation at once, the rules' file, and the audit stream (draft §3 AAM)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from bus.server.embedded import EmbeddedServer
from dmsc.client.async_client import AsyncClient
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.authorizer.access.access_policy import default_text
from entities.authorizer.audit.audit_trail import AuditTrail
from entities.authorizer.audit.rate_limited_records import RateLimitedRecordsConfig
from entities.authorizer.audit.refusals import new_record
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.operations.access_client import AccessClient
from entities.service_registry.service import ServiceRegistry
from schemas.access import UserAnswer, UserCommand
from schemas.audit import AuditEntry, AuditRecord, verify
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Conflict, NotFound, Refused
from schemas.registry import Endpoint, InstanceState, ServiceRecord, owner_tag
from tests.builders.jobs import job
from tests.builders.records import service
from tests.integration.entities.conftest import Dial, Start, end, write_users
from tests.patience import PATIENCE_S
from tests.waiting import eventually

FOLDING = RateLimitedRecordsConfig(window_s=0.3, each=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder's share: an administrator in the users' file, the rules, the key of tokens."""
    write_users(tmp_path / "tokens.yaml", ("root", "admin", "root"), ("ruth", "researcher", "ruth"))
    (tmp_path / "access.yaml").write_text(default_text())
    key = tmp_path / "user_key"
    key.write_text("01" * 32)
    key.chmod(0o600)
    return tmp_path


def config(folder: Path, sid: str = "authorizer") -> AuthorizerConfig:
    return AuthorizerConfig(
        tokens_file=folder / "tokens.yaml",
        access_file=folder / "access.yaml",
        user_key=folder / "user_key",
        sid=sid,
        check_s=0.05,
        refused_requests=FOLDING,
    )


@pytest.fixture
async def authorizer(dial: Dial, start: Start, registry: ServiceRegistry, folder: Path) -> Authorizer:
    service = Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config(folder))
    await start(service)
    return service


@pytest.fixture
async def bus(dial: Dial) -> Bus:
    return await dial("gateway-east", EntityKind.GATEWAY)


async def command(bus: Bus, token: str, op: Any, name: str = "", **more: Any) -> UserAnswer:
    message = UserCommand(token=token, gateway="gateway-east", op=op, name=name, **more)
    answer = await bus.request(subjects.USER_COMMAND, message, timeout_s=PATIENCE_S, gateway="gateway-east")
    assert isinstance(answer, UserAnswer)
    return answer


async def add(bus: Bus, name: str, role: str, **more: Any) -> str:
    token = (await command(bus, "root", "add", name, role=role, **more)).token
    assert token is not None
    return token


async def refusal(guard: AccessClient, token: str) -> str:
    """Why the token opens nothing; empty where it does."""
    try:
        await guard.check(token, "mesh.read", "mesh")
    except Refused as error:
        return "" if error.fields["user"] else error.text
    return ""


async def entries(bus: Bus) -> list[AuditEntry]:
    return [
        AuditEntry(sequence=one.sequence, record=one.message)
        async for one in bus.history(subjects.AUDIT)
        if isinstance(one.message, AuditRecord)
    ]


async def test_a_user_is_added_gets_in_is_revoked_and_is_out_at_every_gateway(
    authorizer: Authorizer, dial: Dial, bus: Bus
) -> None:
    token = await add(bus, "nina", "operator")
    guards = [
        AccessClient(await dial(f"gateway-{name}", EntityKind.GATEWAY), f"gateway-{name}") for name in "ab"
    ]
    async with guards[0].following(bus), guards[1].following(bus):
        for guard in guards:
            assert (await guard.check(token, "mesh.read", "mesh")).user == "nina"
        answer = await command(bus, "root", "revoke", "nina", reason="laptop lost")
        assert answer.token is None
        assert answer.users[0].tokens == ()
        for guard in guards:
            assert (
                await refusal(guard, token)
                == "this token of nina was revoked by root (laptop lost); ask for a new one"
            )
    fresh = (await command(bus, "root", "token", "nina")).token
    assert fresh is not None
    assert (await guards[0].check(fresh, "mesh.read", "mesh")).user == "nina", "a new token counts"


async def test_a_revoked_users_connections_are_ended_and_that_is_recorded(
    dial: Dial, start: Start, registry: ServiceRegistry, folder: Path, bus: Bus
) -> None:
    thrown_out: list[str] = []

    async def disconnect(name: str) -> int:
        thrown_out.append(name)
        return 2

    service = Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config(folder), disconnect)
    await start(service)
    await add(bus, "nina", "viewer")
    await command(bus, "root", "revoke", "nina")
    assert thrown_out == ["nina"]
    last = (await entries(bus))[-1].record
    assert (last.kind, last.resource, last.reason) == ("eviction", "nina", "2 connections to the bus ended")


async def test_nobody_is_called_so_that_a_module_of_the_meshs_were_theirs(
    authorizer: Authorizer, registry: ServiceRegistry, dial: Dial, bus: Bus
) -> None:
    module = await dial("routing-bandit", EntityKind.FUNCTIONAL_MODULE)
    record = ServiceRecord(
        sid="routing-bandit",
        prefix="module/routing-bandit",
        kind=EntityKind.FUNCTIONAL_MODULE,
        incarnation=module.sender.incarnation,
        state=InstanceState.ACTIVE,
        endpoint=Endpoint(cluster="mesh", node="n"),
    )
    async with RegistrationClient(module, record):
        for name in ("routing", "routing-bandit"):
            with pytest.raises(Conflict, match="module routing-bandit of the mesh's own: choose another"):
                await add(bus, name, "researcher")
        await add(bus, "rout", "researcher")


async def test_a_stream_ends_with_the_token_that_opened_it(authorizer: Authorizer, bus: Bus) -> None:
    token = await add(bus, "nina", "viewer")
    guard = AccessClient(bus, "gateway-east")

    async with guard.following(bus):
        await guard.check(token, "mesh.read", "mesh")
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with guard.lasting(token, "mesh.read", "mesh", ended.set_result):
            await command(bus, "root", "revoke", "nina", reason="left")
            async with asyncio.timeout(PATIENCE_S):
                assert "revoked by root (left)" in await ended


async def test_a_stream_ends_when_its_token_expires(authorizer: Authorizer, bus: Bus) -> None:
    token = await add(bus, "nina", "viewer", expires_s=1.0)
    guard = AccessClient(bus, "gateway-east")
    await guard.check(token, "mesh.read", "mesh")
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with guard.lasting(token, "mesh.read", "mesh", ended.set_result):
        async with asyncio.timeout(PATIENCE_S):
            assert "expired" in await ended


async def test_an_expired_token_is_refused_with_one_line(authorizer: Authorizer, bus: Bus) -> None:
    token = await add(bus, "nina", "viewer", expires_s=0.5)
    guard = AccessClient(bus, "gateway-east")

    assert (
        await eventually(lambda: refusal(guard, token)) == "this token of nina has expired; ask for a new one"
    )


async def test_revocations_survive_a_restart_and_a_removed_user_stays_out(
    dial: Dial, start: Start, registry: ServiceRegistry, folder: Path, bus: Bus
) -> None:
    first = await start(Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config(folder)))
    token = await add(bus, "nina", "viewer")
    await command(bus, "root", "remove", "nina")
    again = await add(bus, "nina", "viewer")
    await end(first)
    second = Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config(folder))
    await start(second)
    guard = AccessClient(bus, "gateway-east")
    with pytest.raises(Refused, match="was revoked by root"):
        await guard.check(token, "mesh.read", "mesh")
    assert (await guard.check(again, "mesh.read", "mesh")).user == "nina"


async def test_the_token_of_the_users_file_is_revoked_like_any_other(
    authorizer: Authorizer, bus: Bus
) -> None:
    guard = AccessClient(bus, "gateway-east")
    await guard.check("ruth", "mesh.read", "mesh")
    await command(bus, "ruth", "revoke", "ruth")  # her own
    with pytest.raises(Refused, match="was revoked by ruth"):
        await AccessClient(bus, "gateway-east").check("ruth", "mesh.read", "mesh")
    (ruth,) = [user for user in (await command(bus, "root", "list")).users if user.name == "ruth"]
    assert ruth.revoked


async def test_what_can_not_be_done_is_one_line(authorizer: Authorizer, bus: Bus) -> None:
    nina = await add(bus, "nina", "researcher")
    with pytest.raises(
        Conflict, match="there is a user nina already; for another token: dmsc user token nina"
    ):
        await add(bus, "nina", "viewer")
    with pytest.raises(NotFound, match="there is no user 'nobody'"):
        await command(bus, "root", "token", "nobody")
    with pytest.raises(BadInput, match="letters, digits"):
        await add(bus, "a b", "viewer")
    with pytest.raises(Conflict, match="in the users' file"):
        await add(bus, "ruth", "viewer")
    with pytest.raises(BadInput, match="at most 90 days"):
        await command(bus, "root", "token", "nina", expires_s=1e9)
    for op in ("add", "token", "remove", "list"):
        with pytest.raises(Refused, match=rf"researcher nina may not user\.{op}"):
            await command(bus, nina, op, "x", role="admin")
    with pytest.raises(Refused, match="only what is theirs"):
        await command(bus, nina, "revoke", "ruth")


async def test_the_rules_are_read_again_and_a_broken_edit_changes_nothing(
    authorizer: Authorizer, bus: Bus, folder: Path
) -> None:
    guard = AccessClient(bus, "gateway-east")
    file = folder / "access.yaml"
    file.write_text("rules: [")
    await eventually(lambda: authorizer.rules.problem)
    await guard.check("ruth", "job.submit", "j")
    file.write_text("rules:\n  - {name: all, actions: [job.cancel], roles: [researcher]}\n")

    async def counts() -> bool:
        try:
            return (await guard.check("ruth", "job.cancel", "j")).rule == "all"
        except Refused:
            return False

    await eventually(counts)
    with pytest.raises(Refused):
        await AccessClient(bus, "gateway-east").check("ruth", "job.submit", "j")
    kinds = {entry.record.kind for entry in await entries(bus)}
    assert "access-file" in kinds


async def test_a_researchers_own_module(authorizer: Authorizer, dial: Dial, bus: Bus) -> None:
    from bus.mesh.registration import RegistrationClient

    module = await dial("module-mine", EntityKind.FUNCTIONAL_MODULE)
    mine = service(
        "module-mine",
        kind=EntityKind.FUNCTIONAL_MODULE,
        prefix="module/mine",
        incarnation=module.sender.incarnation,
        tags=(owner_tag("ruth"),),
    )
    async with RegistrationClient(module, mine):
        guard = AccessClient(bus, "gateway-east")
        assert (await guard.check("ruth", "policy.promote", "mine")).rule == "own-policies"
        with pytest.raises(Refused, match="only what is theirs; other: no such policy"):
            await guard.check("ruth", "policy.promote", "other")


async def test_privileged_acts_and_refusals_are_in_the_chain_of_two_authorizers(
    authorizer: Authorizer, dial: Dial, start: Start, bus: Bus, folder: Path
) -> None:
    second = Authorizer(await dial("authorizer-2", EntityKind.AUTHORIZER), config(folder, sid="authorizer-2"))
    await start(second)
    guard = AccessClient(bus, "gateway-east")
    jobs = (await dial("orchestrator", EntityKind.ORCHESTRATOR)).bucket(subjects.JOB_RECORD)
    await jobs.put(job("hers", user="ruth"), job="hers")

    async def act(node: int) -> None:
        await guard.check("root", "node.drain", f"node-{node}")

    await asyncio.gather(*(act(node) for node in range(12)))
    await guard.check("root", "job.cancel", "hers")
    await guard.check("ruth", "job.cancel", "hers")  # her own: nothing special
    with pytest.raises(Refused):
        await guard.check("ruth", "node.drain", "node-1")

    async def all_there() -> list[AuditEntry]:
        found = await entries(bus)
        return found if any(entry.record.kind == "refused" for entry in found) else []

    found = await eventually(all_there)
    acts = [entry.record for entry in found if entry.record.kind == "act"]
    assert {one.resource for one in acts} == {*(f"node-{node}" for node in range(12)), "hers"}
    assert {one.user for one in acts} == {"root"}
    assert {one.authorizer for one in acts} == {"authorizer", "authorizer-2"}
    assert verify(found).broken is None
    assert verify([found[0], *found[2:]]).broken == found[2].sequence, "a copy with one record taken out"


async def test_a_flood_of_refusals_is_counted_and_not_recorded_one_by_one(
    authorizer: Authorizer, bus: Bus
) -> None:
    guard = AccessClient(bus, "gateway-east")

    async def try_it(number: int) -> None:
        with pytest.raises(Refused):
            await guard.check(f"guess-{number}", "mesh.read", "mesh")

    for number in range(40):
        await try_it(number)

    async def told() -> list[AuditRecord]:
        found = [entry.record for entry in await entries(bus)]
        return found if sum(record.count for record in found) == 40 else []

    found = await eventually(told)
    assert any(record.kind == "folded" for record in found)
    assert not any("guess" in record.model_dump_json() for record in found), "no token in the audit"


async def test_a_record_that_was_stored_unknowingly_is_stored_once(
    dial: Dial, registry: ServiceRegistry
) -> None:
    bus = await dial("authorizer", EntityKind.AUTHORIZER)
    trail = AuditTrail(bus, "authorizer")
    record = new_record("authorizer", "act", user="root", action="node.drain")
    first = await trail._write(record)
    assert await trail._write(record) == first, "the same id within two minutes"
    assert len(await entries(bus)) == 1


async def test_an_act_asked_again_at_a_second_authorizer_is_recorded_once(
    dial: Dial, registry: ServiceRegistry
) -> None:
    bus = await dial("authorizer", EntityKind.AUTHORIZER)
    trails = [AuditTrail(bus, "authorizer"), AuditTrail(bus, "authorizer-2")]
    for trail in (*trails, trails[0]):
        await trail.act(
            "act", request_id="gateway-east.1-7", user="root", action="node.drain", resource="node-1"
        )
    assert [entry.record.authorizer for entry in await entries(bus)] == ["authorizer"]
    await trails[1].act(
        "act", request_id="gateway-east.1-7", user="root", action="node.drain", resource="node-2"
    )
    await trails[0].act(
        "act", request_id="gateway-east.1-8", user="root", action="node.drain", resource="node-1"
    )
    found = await entries(bus)
    assert [entry.record.resource for entry in found] == ["node-1", "node-2", "node-1"]
    assert verify(found).broken is None


async def test_no_record_is_deleted_or_purged_by_the_streams_own_commands(
    authorizer: Authorizer, bus: Bus
) -> None:
    from bus.nats import jetstream
    from schemas.errors import DmscError

    await add(bus, "nina", "viewer")
    before = await entries(bus)
    for command_, payload in (("MSG.DELETE", {"seq": 1}), ("PURGE", {"keep": 0})):
        with pytest.raises(DmscError):
            await jetstream.call(bus.connection, f"STREAM.{command_}.AUDIT", payload)
    assert await entries(bus) == before
    assert before


async def test_without_the_audit_stream_nothing_privileged_is_done(
    authorizer: Authorizer, own_server: EmbeddedServer, bus: Bus
) -> None:
    from bus.nats import jetstream
    from schemas.errors import Unavailable

    await jetstream.call(bus.connection, "STREAM.DELETE.AUDIT")
    guard = AccessClient(bus, "gateway-east")
    await guard.check("root", "mesh.read", "mesh")
    with pytest.raises((Unavailable, NotFound), match="stream"):
        await bus.request(
            subjects.USER_COMMAND,
            UserCommand(token="root", gateway="gateway-east", op="add", name="nina", role="viewer"),
            timeout_s=PATIENCE_S,
            gateway="gateway-east",
        )
    assert all(user.name != "nina" for user in (await command(bus, "root", "list")).users)


async def test_over_http_with_the_client(
    authorizer: Authorizer, dial: Dial, start: Start, smo: object
) -> None:
    gateway = Gateway(await dial("gateway-a", EntityKind.GATEWAY), GatewayConfig(cluster="a", http_port=0))
    await start(gateway)
    assert gateway.url is not None
    async with AsyncClient(gateway.url, token="root") as root:
        answer = await root.add_user("nina", "researcher", expires_s=60)
        assert answer.token is not None
        assert {user.name for user in await root.users()} == {"nina", "root", "ruth"}
        async with AsyncClient(gateway.url, token=answer.token) as nina:
            me = await nina.whoami()
            assert (me.user, me.role) == ("nina", "researcher")
            assert me.expires_at is not None
            with pytest.raises(Refused, match=r"may not audit\.read"):
                await nina.latest_audit()
            mine = await nina.explain_access("", "job.cancel", "j")
            assert (mine.allow, mine.rules[-1].name) == (False, "administer")
            with pytest.raises(Refused):
                await nina.explain_access("root", "job.cancel")
            assert (await root.explain_access("nina", "job.submit")).rule == "research"
            await root.revoke("nina", reason="gone")

            async def out() -> bool:
                try:
                    await nina.whoami()
                except Refused as error:
                    return "revoked" in error.text
                return False

            await eventually(out)
        assert "no user any more" in (await root.remove_user("nina")).note
        found = [entry async for entry in root.audit()]
        assert [entry.record.action for entry in found if entry.record.kind == "users"] == [
            "user.add",
            "user.revoke",
            "user.remove",
        ]
        assert verify(found).broken is None
        (latest,) = await root.latest_audit(
            1
        )  # refusals are recorded behind the answer: it may be a newer one
        assert latest.sequence >= found[-1].sequence
