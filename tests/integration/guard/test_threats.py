"""What must and must not be possible, by hand, from the threat model of docs/security.md."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging.rendezvous import Rendezvous, links_of
from bus.nats.reply_subjects import inbox_of_token
from bus.security import nats_jwt
from bus.security.credentials import Credential, delegate, issue, new_root
from bus.security.identity import Identity
from bus.security.nats_jwt import SigningKeys
from bus.wire import codec
from entities.authorizer.disconnection import Disconnections
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope, Sender
from schemas.errors import DmscError, Refused
from schemas.gateway_api import CancelJob
from schemas.names import MESH
from schemas.registry import Heartbeat, InstanceState, Resolve, Resolved
from schemas.signals import Role
from tests.builders.jobs import job
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.raw_connection import Shut, raw_connection
from tests.patience import PATIENCE_S
from tests.waiting import eventually

AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")


def instance(sid: str = "j-s0-r0", job: str = "j", **fields: str) -> Identity:
    return Identity(name=sid, kind=K.INSTANCE, job=job, **{"cluster": "a", "node": "n", **fields})


def of_agent(mesh: Guarded, who: Identity, **options: Any) -> str:
    made = delegate(issue(mesh.root, AGENT), who, **options)
    assert made is not None
    return made


def bus_of(mesh: Guarded, who: Identity, token: str | None = None) -> Any:
    token = token or (of_agent(mesh, who) if who.kind is K.INSTANCE else issue(mesh.root, who))
    return Bus.connect(mesh.url, name=who.name, kind=who.kind, token=token, connect_timeout_s=PATIENCE_S)


SMO, SRD = (
    Identity(name="orchestrator", kind=K.ORCHESTRATOR),
    Identity(name="service-registry", kind=K.SERVICE_REGISTRY),
)
MODULE = Identity(name="mine", kind=K.FUNCTIONAL_MODULE, module="mine")
GATEWAY = Identity(name="gateway-a", kind=K.GATEWAY, cluster="a")
ROUTER = Identity(name="router-a", kind=K.ROUTER, cluster="a")
V = "dmsc.v1"

MAY_NOT_PUBLISH = [
    # an instance speaks only as itself
    (instance(), f"{V}.registry.heartbeat.j-s1-r0"),
    (instance(), f"{V}.registry.heartbeat.orchestrator"),
    (instance(), f"{V}.signal.registration.j-s1-r0"),
    (instance(), f"{V}.registry.state.a-n"),
    (instance(), f"{V}.telemetry.instance.j.j-s1-r0"),
    (instance(), f"{V}.log.gateway-a"),
    (instance(), f"{V}.step.claim.j.j-s0-r1"),
    # … and only for its job
    (instance(), f"{V}.step.claim.k.j-s0-r0"),
    (instance(), f"{V}.data.notice.k.k-s0-r0"),
    (instance(), f"{V}.fault.link.a.k"),
    # it steers nothing
    (instance(), f"{V}.step.commit.j.j-s0-r1"),
    (instance(), f"{V}.step.prepare.j.j-s0-r0"),
    (instance(), f"{V}.job.command.cancel"),
    (instance(), f"{V}.cluster.a-n.start"),
    (instance(), f"{V}.door.job-submit"),
    (instance(), "$KV.routes.j.a.0"),
    (instance(), "$KV.jobs.j"),
    (instance(), "$KV.steps.j"),
    # nor JetStream
    (instance(), "$JS.API.STREAM.CREATE.KV_rendezvous"),
    (instance(), "$JS.API.STREAM.UPDATE.KV_jobs"),
    (instance(), "$JS.API.STREAM.PURGE.KV_rendezvous"),
    (instance(), "$JS.API.STREAM.DELETE.JOBS"),
    (instance(), "$JS.API.CONSUMER.CREATE.KV_routes"),
    (instance(), "$JS.API.CONSUMER.CREATE.KV_routes.r.$KV.routes.j.a.*"),
    (instance(), f"{V}.broker.instance.j.j-s1-r0"),
    (instance(), f"{V}.broker.instance.k.j-s0-r0"),
    (instance(), f"{V}.broker.instance.~.j-s0-r0"),
    (instance(), f"{V}.broker.user.operator.j-s0-r0"),
    (instance(), "$JS.API.CONSUMER.CREATE.KV_routes.r.$KV.routes.k.a.0"),
    (instance(), "$JS.API.CONSUMER.CREATE.OBJ_artifacts.r.$O.artifacts.C.>"),
    (instance(), "$JS.API.DIRECT.GET.OBJ_artifacts"),
    # nor whoever else's inbox
    (instance(), "_INBOX.orchestrator.abc.1"),
    # a node agent, a module, a router, a gateway: each in its place
    (AGENT, f"{V}.registry.heartbeat.b-n"),
    (AGENT, f"{V}.registry.state.j-s0-r0"),
    (AGENT, f"{V}.registry.instance_state.b-n.j-s0-r0"),
    (AGENT, f"{V}.signal.registration.orchestrator"),
    (AGENT, f"{V}.telemetry.node.b-n"),
    (AGENT, f"{V}.cluster.b-n.start"),
    (AGENT, f"{V}.job.command.submit"),
    (MODULE, f"{V}.policy.suggestion.system.another"),
    (MODULE, f"{V}.policy.suggestion.researcher.mine"),
    (MODULE, f"{V}.policy.decision.mine"),
    (MODULE, f"{V}.policy.command.promote"),
    (MODULE, f"{V}.step.claim.j.j-s0-r0"),
    (ROUTER, "$KV.routes.j.b.0"),
    (ROUTER, f"{V}.signal.compute.b"),
    (ROUTER, f"{V}.step.commit.j.j-s0-r0"),
    (GATEWAY, f"{V}.signal.access.gateway-b"),
    (GATEWAY, f"{V}.step.commit.j.j-s0-r0"),
    (GATEWAY, "$KV.jobs.j"),
    (SMO, f"{V}.signal.access.gateway-a"),
    (SRD, "$KV.jobs.j"),
    # the server's own affairs are nobody's
    (SMO, "$SYS.REQ.SERVER.PING"),
    (SMO, "$SYS.REQ.USER.AUTH"),
]
MAY_NOT_LISTEN = [
    (instance(), f"{V}.step.commit.j.j-s0-r1"),
    (instance(), f"{V}.data.notice.j.*"),
    (instance(), f"{V}.data.notice.k.j-s0-r0"),
    (instance(), f"{V}.signal.access.*"),
    (instance(), f"{V}.log.*"),
    (instance(), f"{V}.>"),
    (instance(), ">"),
    (instance(), "_INBOX.>"),
    (instance(), "_INBOX.orchestrator.>"),
    (instance(), "$KV.routes.k.a.*"),
    (instance(), "$O.>"),
    (instance(), "$SYS.>"),
    (AGENT, f"{V}.cluster.*.start"),
    (AGENT, f"{V}.signal.access.*"),
    (MODULE, f"{V}.signal.access.*"),
    (MODULE, f"{V}.door.*"),
    (GATEWAY, "_INBOX.gateway-b.>"),
    (GATEWAY, ">"),
    (ROUTER, f"{V}.signal.access.*"),
    (SMO, f"{V}.signal.access.*"),
    (SMO, "_INBOX.gateway-a.>"),
    (SMO, "$SYS.>"),
]
MAY_PUBLISH = [
    (instance(), f"{V}.registry.heartbeat.j-s0-r0"),
    (instance(), f"{V}.data.notice.j.j-s1-r0"),
    (instance(), f"{V}.fault.link.a.j"),
    (instance(), f"{V}.fault.link.b.j"),  # whose router may serve its cluster
    (instance(), f"{V}.broker.instance.j.j-s0-r0"),
    (AGENT, f"{V}.registry.instance_state.a-n.j-s0-r0"),
    (MODULE, f"{V}.policy.suggestion.system.mine"),
    (ROUTER, "$KV.routes.j.a.0"),
    (GATEWAY, f"{V}.signal.access.gateway-a"),
    (SMO, f"{V}.cluster.a-n.start"),
    (SMO, "$JS.API.STREAM.UPDATE.JOBS"),
    (SRD, "$KV.registry.j-s0-r0"),
]


async def test_by_hand_from_the_threat_model(mesh: Guarded) -> None:
    identities = {who.name: who for who, _ in MAY_NOT_PUBLISH + MAY_NOT_LISTEN + MAY_PUBLISH}
    for name, who in identities.items():
        token = of_agent(mesh, who) if who.kind is K.INSTANCE else issue(mesh.root, who)
        async with raw_connection(mesh.url, token, name, who.kind) as connection:
            wrong = {subject for one, subject in MAY_NOT_PUBLISH if one == who}
            assert await connection.denied(publish=wrong) == wrong
            wrong = {subject for one, subject in MAY_NOT_LISTEN if one == who}
            assert await connection.denied(subscribe=wrong) == wrong
            assert await connection.denied(publish=[s for one, s in MAY_PUBLISH if one == who]) == set()


# --- credentials --------------------------------------------------------------------------------------------
async def shut(mesh: Guarded, token: str, reason: str, **options: Any) -> None:
    with pytest.raises(Shut):  # its word is not always read before the connection is gone
        async with raw_connection(mesh.url, token, **options):
            pass
    assert reason in mesh.reasons
    assert token not in mesh.reasons


async def test_who_is_not_let_in(mesh: Guarded) -> None:
    await shut(mesh, "nobody's token", "neither a credential of this mesh nor a user's token")
    await shut(mesh, issue(new_root(), SMO), "not from this mesh")
    await shut(mesh, issue(mesh.root, SMO, lifetime_s=-1), "has expired")
    await shut(mesh, of_agent(mesh, instance(), lifetime_s=-1), "has expired")
    await shut(mesh, issue(mesh.root, SMO, now=time.time() + 3600), "not valid yet")
    expired = issue(mesh.root, AGENT, lifetime_s=-1)
    await shut(mesh, delegate(expired, instance()) or "", "the credential of a-n has expired")


async def test_a_connection_that_was_overheard_can_not_be_made_again(mesh: Guarded) -> None:
    said: dict[str, Any] = {}
    token = issue(mesh.root, SMO)
    async with raw_connection(mesh.url, token, "orchestrator", K.ORCHESTRATOR, said=said):
        pass
    await shut(mesh, token, "answered an older nonce", sig=said["sig"])
    await shut(mesh, said["auth_token"], "neither a credential of this mesh nor a user's token")


async def test_a_chain_can_not_be_made_longer_or_wider(mesh: Guarded) -> None:
    agent = Credential.parse(issue(mesh.root, AGENT))
    made = Credential.parse(of_agent(mesh, instance()))
    other = Credential.parse(of_agent(mesh, instance("k-s0-r0", "k")))
    # the key of another
    await shut(mesh, Credential(made.chain, made.keys).text, "older nonce", sig="AAAA")
    mixed = Credential((made.chain[0], other.chain[1]), other.keys)  # two agents' credentials of one name
    await shut(mesh, mixed.text, "put together from several")
    # an instance hands on nothing, an agent nothing but instances of its node
    with pytest.raises(Refused, match="may not give a credential"):
        delegate(made.text, instance("j-s1-r0"))
    for who in (SMO, instance(node="m"), instance(cluster="b"), instance(job="*")):
        with pytest.raises(Refused, match="may not give a credential"):
            delegate(agent.text, who)
        forged = forge(agent, who.claims())
        await shut(mesh, forged.text, "may not give a credential")
    forged = forge(made, instance("j-s1-r0").claims())
    await shut(mesh, forged.text, "instance j-s0-r0 may not give a credential")
    await shut(mesh, forge(forged, instance("j-s2-r0").claims()).text, "too long")


async def test_leave_to_join_is_for_the_agents_of_its_cluster(mesh: Guarded) -> None:
    leave = issue(mesh.root, Identity(name="join-a", kind=K.CLUSTER, cluster="a", node="*"))
    agent = delegate(leave, AGENT) or ""
    async with raw_connection(
        mesh.url, delegate(agent, instance()) or "", "j-s0-r0", K.INSTANCE
    ) as connection:
        assert await connection.denied(publish=[f"{V}.registry.heartbeat.j-s0-r0"]) == set()
    for who in (
        Identity(name="b-n", kind=K.CLUSTER, cluster="b", node="n"),
        Identity(name="a-m", kind=K.CLUSTER, cluster="a", node="n"),
        instance(),
        GATEWAY,
        SMO,
    ):
        with pytest.raises(Refused, match="may not give a credential"):
            delegate(leave, who)
        await shut(mesh, forge(Credential.parse(leave), who.claims()).text, "may not give a credential")
    for name in ("orchestrator", "gateway-a"):  # names of the mesh's own parts, whoever signs
        claims = AGENT.claims() | {"name": name}
        await shut(mesh, forge(Credential.parse(leave), claims).text, "is the name of a part of the mesh")


async def test_a_nodes_credential_makes_no_instance_with_anothers_name(mesh: Guarded) -> None:
    """One that is called `gateway-a` would hear what a gateway hears."""
    agent = Credential.parse(issue(mesh.root, AGENT))
    for name in ("gateway-a", "k-s0-r0", "a-n", "orchestrator"):
        forged = forge(agent, instance().claims() | {"name": name})
        await shut(mesh, forged.text, "is not called as those of job j are")


async def test_a_user_with_an_entitys_name_runs_no_module_of_that_name(mesh: Guarded) -> None:
    mesh.users[:] = [replace(user, name="gateway") for user in mesh.users if user.role is Role.RESEARCHER]
    async with raw_connection(mesh.url, TOKENS[Role.RESEARCHER], "gateway-a") as connection:
        for subject in (f"{V}.registry.heartbeat.gateway-a", f"{V}.signal.registration.gateway-a"):
            assert await connection.denied(publish=[subject]) == {subject}
        for subject in ("_INBOX.gateway.gateway-a.>", "_INBOX.functional-module.gateway-a.>"):
            assert await connection.denied(subscribe=[subject]) == {subject}


def forge(giver: Credential, who: dict[str, str]) -> Credential:
    """What somebody who leaves our own checks out could sign with the key of `giver`."""
    keys, now = SigningKeys.user(), int(time.time())
    claims = {"type": "dmsc-identity", "iss": giver.keys.public, "sub": keys.public, "iat": now}
    link = nats_jwt.encode(claims | {"exp": now + 60, "id": who}, giver.keys)
    return Credential((*giver.chain, link), keys)


async def test_malformed_credentials_and_names_end_no_responder(mesh: Guarded) -> None:
    token = issue(mesh.root, SMO)
    for shown in ("", "~", "a.b.c", "a.b.c~" * 200, "é", "x" * 2_900, "{}", "eyJ9.eyJ9.AA"):
        for signature in ("", "AAAA", "é", "." * 100):
            with pytest.raises(Shut):
                async with raw_connection(mesh.url, token, auth_token=shown, sig=signature):
                    pass
    async with raw_connection(mesh.url, token, "x" * 500):
        pass
    for name in ("*", ">", "a.b", "a\n"):
        claims = SMO.claims() | {"name": name}
        root = Credential((), SigningKeys(mesh.root.removeprefix("dmsc_root_")))

        await shut(mesh, forge(root, claims).text, "is not one token")


# --- thrown out ---------------------------------------------------------------------------------------------
async def test_a_user_who_is_removed_while_connected_is_out_and_stays_out(mesh: Guarded) -> None:
    token = TOKENS[Role.RESEARCHER]
    other = raw_connection(mesh.url, TOKENS[Role.VIEWER])
    async with raw_connection(mesh.url, token) as connection, other as bystander:
        mesh.users[:] = [user for user in mesh.users if user.role is not Role.RESEARCHER]
        began = asyncio.get_running_loop().time()
        throwing = asyncio.create_task(Disconnections([mesh.url], mesh.keys).disconnect("researcher-one"))
        async with asyncio.timeout(PATIENCE_S):
            while await connection.reader.readline():
                pass
        print(f"out after {asyncio.get_running_loop().time() - began:.3f} s")
        assert await throwing == 1
        await bystander.until_pong()
    await shut(mesh, token, "neither a credential of this mesh nor a user's token")


async def test_a_credential_that_expires_ends_its_connection(mesh: Guarded) -> None:
    async with raw_connection(mesh.url, of_agent(mesh, instance(), lifetime_s=1.5)) as connection:
        async with asyncio.timeout(PATIENCE_S):
            lines = [line async for line in connection.reader]
    assert any(b"expired" in line.lower() for line in lines), lines


# --- what the bus makes of it -------------------------------------------------------------------------------
async def test_what_the_server_refuses_is_one_clear_line_for_the_caller(mesh: Guarded) -> None:
    async def nothing(message: object, envelope: Envelope) -> None:
        raise AssertionError

    async with bus_of(mesh, instance()) as bus:
        with pytest.raises(Refused, match=r"j-s0-r0 may not listen on dmsc\.v1\.step\.abort\.j\.j-s1-r0$"):
            await bus.subscribe(subjects.STEP_ABORT, nothing, job="j", sid="j-s1-r0")
        with pytest.raises(Refused, match=r"may not publish on dmsc\.v1\.job\.command\.cancel$"):
            await bus.request(subjects.CANCEL, CancelJob(job="j", user="eve"), timeout_s=PATIENCE_S)
        with pytest.raises(Refused, match=r"may not publish on dmsc\.v1\.job\.command\.cancel$"):
            await bus.command(subjects.CANCEL, CancelJob(job="j", user="eve"), deadline_s=PATIENCE_S)
        with pytest.raises(Refused, match="may not publish"):
            await bus.bucket(subjects.JOB_RECORD).delete(job="j")
        with pytest.raises(Refused, match="may not publish"):
            await bus.bucket(subjects.ROUTE_TABLE).entries(job="k", cluster="a")
        assert await bus.bucket(subjects.ROUTE_TABLE).entries(job="j", cluster="a") == []
        with pytest.raises(Refused):
            async for _ in bus.history(subjects.LOG):
                pass
    with pytest.raises(Refused, match="refuses tool: Authorization Violation; check its token"):
        async with bus_of(mesh, Identity(name="tool", kind=K.CLIENT), new_root()):
            pass


async def test_who_serves_may_answer_those_who_asked_and_once(mesh: Guarded) -> None:
    async def resolve(message: Resolve, envelope: Envelope) -> Resolved:
        return Resolved(revision=7, records=())

    async with bus_of(mesh, SRD) as registry, bus_of(mesh, instance()) as asker:
        await registry.serve(subjects.RESOLVE, resolve)
        answer = await asker.request(subjects.RESOLVE, Resolve(), timeout_s=PATIENCE_S)
        assert answer.revision == 7
        async with raw_connection(mesh.url, issue(mesh.root, SRD), "service-registry") as other:
            inbox = "_INBOX.j-s0-r0.0.1"
            assert await other.denied(publish=[inbox]) == {inbox}


async def test_instances_of_one_job_meet_and_those_of_another_do_not(mesh: Guarded) -> None:
    async with bus_of(mesh, instance()) as one, bus_of(mesh, instance("j-s1-r0")) as two:
        await Rendezvous(one, links_of("j")).set("key", b"here")
        assert await Rendezvous(two, links_of("j")).get("key", timeout_s=PATIENCE_S) == b"here"
        assert await Rendezvous(one, links_of("j")).add("count", 2) == 2
        async with bus_of(mesh, instance("k-s0-r0", "k")) as stranger:
            theirs = Rendezvous(stranger, links_of("j"))
            for attempt in (theirs.set("key", b"forged"), theirs.add("count", 1), theirs.forget("key", 1)):
                with pytest.raises(DmscError, match="may not publish"):
                    await attempt


async def test_objects_are_written_and_read_without_a_consumer(mesh: Guarded) -> None:
    data = bytes(range(256)) * 8_192
    async with bus_of(mesh, SMO) as orchestrator:
        await orchestrator.bucket(subjects.JOB_RECORD).put(job("j"), job="j")
    async with bus_of(mesh, instance()) as writer, bus_of(mesh, GATEWAY) as gateway:
        await writer.objects.put("artifacts/j/model", data)
        for bus in (writer, gateway):
            assert b"".join([piece async for piece in bus.objects.get("artifacts/j/model")]) == data
        assert [info.name for info in await gateway.objects.list()] == ["artifacts/j/model"]


async def test_a_stored_message_can_not_be_sent_elsewhere_by_reading_it(mesh: Guarded) -> None:
    """JetStream answers to any reply subject; whoever serves there takes nothing that was stored."""
    cancelled: list[CancelJob] = []

    async def cancel(message: CancelJob, envelope: Envelope) -> Resolved:
        cancelled.append(message)
        return Resolved(revision=0, records=())

    sender = Sender(name="gateway-a", kind=K.GATEWAY, incarnation="x")
    crafted = codec.encode(CancelJob(job="j", user="eve"), codec.sender_map(sender), "forged-1")
    victim = subjects.CANCEL()
    async with (
        bus_of(mesh, SMO) as orchestrator,
        bus_of(mesh, MODULE) as module,
        raw_connection(mesh.url, TOKENS[Role.VIEWER]) as reader,
    ):
        subscription = await orchestrator.serve(subjects.CANCEL, cancel)
        place = subjects.SUGGESTION(owner=MESH, module="mine")
        await module.connection.send(place, crafted)
        await module.barrier()
        assert await reader.denied(publish=[f"$JS.API.DIRECT.GET.POLICIES.{place}"])
        # the mesh's owner may, and its tap could be somebody's tool
        async with bus_of(mesh, Identity(name="tap", kind=K.TAP)) as tap:
            await tap.connection.send(f"$JS.API.DIRECT.GET.POLICIES.{place}", b"", reply=victim)
        await eventually(lambda: orchestrator.counters.dead_letters)
        await subscription.stop()
    assert cancelled == []


# --- users --------------------------------------------------------------------------------------------------
async def test_a_users_bus_taps_what_the_role_shows(mesh: Guarded) -> None:
    heard: asyncio.Queue[Heartbeat] = asyncio.Queue()

    async def beat(message: Heartbeat, envelope: Envelope) -> None:
        heard.put_nowait(message)

    connection = Bus.connect(
        mesh.url, name="tap", kind=K.TAP, token=TOKENS[Role.VIEWER], connect_timeout_s=PATIENCE_S
    )
    async with connection as tap, bus_of(mesh, SMO) as orchestrator:
        await tap.subscribe(subjects.HEARTBEAT, beat)
        said = Heartbeat(sid="orchestrator", incarnation="x", state=InstanceState.ACTIVE, digest="0")
        await orchestrator.publish(subjects.HEARTBEAT, said, sid="orchestrator")
        async with asyncio.timeout(PATIENCE_S):
            assert (await heard.get()).sid == "orchestrator"
        for row in (subjects.ACCESS, subjects.DOOR, subjects.DEAD_LETTER):
            with pytest.raises(Refused):
                await tap.subscribe(row, beat)
        with pytest.raises(Refused):
            await tap.request(subjects.CANCEL, CancelJob(job="j", user="eve"), timeout_s=PATIENCE_S)
        assert [item async for item in tap.history(subjects.LOG)] == []
        with pytest.raises(Refused):
            assert [item async for item in tap.history(subjects.AUDIT)]


async def test_a_wide_subscription_hears_no_more_than_the_narrow_ones(mesh: Guarded) -> None:
    """The server takes the `>` of a subscription for a token like any other, and lets it in by a `*`."""
    open_to_all = subjects.HEARTBEAT(sid="orchestrator")
    private = subjects.STORE_QUERY(job="j", sid="j-s0-r0")
    wide = {f"{V}.{middle}>" for middle in ("", "*.", "*.*.", "*.*.*.")}
    for subject in (open_to_all, private):
        tokens = subject.split(".")
        wide |= {".".join([*tokens[:count], ">"]) for count in range(2, len(tokens))}
    async with raw_connection(mesh.url, TOKENS[Role.VIEWER]) as viewer, bus_of(mesh, SMO) as orchestrator:
        for number, subject in enumerate(sorted(wide)):
            viewer.writer.write(f"SUB {subject} w{number}\r\n".encode())
        await viewer.until_pong()
        await orchestrator.connection.send(private, b"")
        await orchestrator.connection.send(open_to_all, b"")
        await orchestrator.barrier()
        heard = {line.split()[1].decode() for line in await viewer.until_pong() if line.startswith(b"MSG")}
    assert heard == {open_to_all}


async def test_a_researcher_runs_modules_that_bear_the_name_and_no_others(mesh: Guarded) -> None:
    for role, sid, owner, may in (
        (Role.RESEARCHER, "researcher-one-bold", "researcher-one", True),
        (Role.RESEARCHER, "researcher-one-bold", MESH, False),  # it has no say in others' jobs
        (Role.RESEARCHER, "researcher-one-bold", "operator-one", False),
        (Role.RESEARCHER, "transience", "researcher-one", False),
        (Role.RESEARCHER, "transience", MESH, False),
        (Role.OPERATOR, "operator-one-bold", MESH, True),
        (Role.OPERATOR, "transience", MESH, False),
        (Role.ADMIN, "transience", MESH, True),
        (Role.VIEWER, "viewer-one", "viewer-one", False),
        (Role.VIEWER, "viewer-one", MESH, False),
    ):
        async with raw_connection(mesh.url, TOKENS[role], sid) as connection:
            for row in (subjects.SUGGESTION, subjects.MODULE_LIFECYCLE, subjects.POLICY_SCORE):
                subject = row(owner=owner, module=sid)
                said = await connection.denied(publish=[subject]) == set()
                assert said is (may or role is Role.ADMIN), (role, subject)
        inbox = inbox_of_token(TOKENS[role])
        async with raw_connection(mesh.url, TOKENS[role]) as connection:
            assert await connection.denied(subscribe=[f"{inbox}.x"]) == set()
