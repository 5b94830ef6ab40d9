"""The registry believes nobody's record of another: each attack here is allowed by its subject, or was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from bus import subjects
from bus.connection import Bus
from bus.nats import reply_subjects
from bus.security.credentials import issue
from bus.security.identity import Identity
from bus.wire import codec
from entities.service_registry.service import ServiceRegistry, ServiceRegistryConfig
from schemas import names
from schemas.base import Message
from schemas.envelope import EntityKind as K
from schemas.envelope import Sender
from schemas.errors import Ack, NotFound, Refused
from schemas.registry import Endpoint, InstanceState, Resolve, ServiceRecord, StateChange
from schemas.signals import Registration, Role
from tests.builders.records import instance as instance_record
from tests.builders.records import service as service_record
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.raw_connection import raw_connection
from tests.integration.guard.test_threats import AGENT, SMO, SRD, bus_of, instance, of_agent
from tests.patience import PATIENCE_S
from tests.waiting import beside

S = InstanceState
OTHER_AGENT = Identity(name="b-n", kind=K.CLUSTER, cluster="b", node="n")
HERE, THERE = Endpoint(cluster="a", node="n"), Endpoint(cluster="b", node="n")
ME = f"{Role.RESEARCHER}-one"
"""The researcher's name, and that of a module of theirs."""


def of_job(sid: str = "j-s0-r0", **more: Any) -> ServiceRecord:
    return instance_record(sid, **{"endpoint": HERE, **more})


def of_module(**more: Any) -> ServiceRecord:
    fields = {"prefix": f"module/{ME}", "kind": K.FUNCTIONAL_MODULE, "endpoint": HERE}
    return service_record(ME, **(fields | more))


@pytest_asyncio.fixture
async def registry(mesh: Guarded) -> AsyncIterator[ServiceRegistry]:
    async with bus_of(mesh, SRD) as bus:
        service = ServiceRegistry(bus, ServiceRegistryConfig())
        ready = asyncio.Event()
        async with beside(service.run(ready)):
            await asyncio.wait_for(ready.wait(), PATIENCE_S)
            yield service


async def register(bus: Bus, record: ServiceRecord) -> None:
    await bus.command(
        subjects.REGISTRATION, Registration(record=record), deadline_s=PATIENCE_S, sid=record.sid
    )


async def register_for(bus: Bus, record: ServiceRecord) -> None:
    told = Registration(record=record)
    agent, sid = bus.sender.name, record.sid
    await bus.command(subjects.INSTANCE_RECORD, told, deadline_s=PATIENCE_S, agent=agent, sid=sid)


async def ended(bus: Bus, record: ServiceRecord) -> Ack:
    change = StateChange(sid=record.sid, incarnation=record.incarnation, state=S.FAULTED, reason="exit 1")
    agent, sid = bus.sender.name, record.sid
    answer: Ack = await bus.command(
        subjects.INSTANCE_STATE, change, deadline_s=PATIENCE_S, agent=agent, sid=sid
    )
    return answer


async def known(bus: Bus, **query: Any) -> dict[str, ServiceRecord]:
    found = await bus.request(subjects.RESOLVE, Resolve(**query), timeout_s=PATIENCE_S)
    return {record.sid: record for record in found.records}


async def test_who_stands_by_and_who_reads_for_others_are_registered(
    mesh: Guarded, registry: ServiceRegistry
) -> None:
    """A second registry, a second orchestrator, and the fixture's broker; an agent is nobody's standby."""
    async with (
        bus_of(mesh, SRD) as second,
        bus_of(mesh, SMO) as orchestrator,
        bus_of(mesh, AGENT) as agent,
        AsyncExitStack() as stack,
    ):
        standby = ServiceRegistry(second, ServiceRegistryConfig())
        await stack.enter_async_context(beside(standby.run()))
        name = names.standby(SMO.name, orchestrator.sender.incarnation)
        await register(orchestrator, service_record(name, prefix="entity/orchestrator", kind=K.ORCHESTRATOR))
        expected = {name, names.standby(SRD.name, second.sender.incarnation), "broker"}
        async with asyncio.timeout(PATIENCE_S):
            while not expected <= (found := await known(orchestrator)).keys():  # noqa: ASYNC110 (what is kept counts)
                await asyncio.sleep(0.05)
        assert found["broker"].kind is K.BROKER
        theirs = names.standby(AGENT.name, agent.sender.incarnation)
        with pytest.raises(Refused):
            await register(agent, service_record(theirs, prefix="entity/orchestrator", kind=K.ORCHESTRATOR))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        # of another's job: a router takes every record of a job and stage for one of its next hops
        (of_module(kind=K.INSTANCE, job="j", stage=0, prefix="train/j/stage/0"), "registers as instance"),
        (of_module(job="j", stage=0), "no job"),
        (of_module(stage=0), "no job"),
        # found where another's service is looked for
        (of_module(prefix="module/mine"), "prefix"),
        (of_module(prefix="entity/gateway/a"), "prefix"),
        (of_module(kind=K.GATEWAY, prefix="entity/gateway/a"), "registers as gateway"),
    ],
)
async def test_a_researchers_module_is_nothing_but_itself(
    mesh: Guarded, registry: ServiceRegistry, record: ServiceRecord, why: str
) -> None:
    token = TOKENS[Role.RESEARCHER]
    async with Bus.connect(mesh.url, name=ME, kind=K.FUNCTIONAL_MODULE, token=token) as bus:
        with pytest.raises(Refused, match=why):
            await register(bus, record)
        assert ME not in await known(bus)
        await register(bus, of_module())
        assert (await known(bus))[ME].kind is K.FUNCTIONAL_MODULE


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"job": "k"}, "an instance of job k"),
        ({"job": None, "stage": None}, "an instance of job None"),
        ({"prefix": "train/k/stage/0"}, "prefix"),
        ({"kind": K.GATEWAY, "job": None, "stage": None, "prefix": "entity/gateway/a"}, "as gateway"),
    ],
)
async def test_an_instance_is_of_its_own_job(
    mesh: Guarded, registry: ServiceRegistry, changed: dict[str, Any], why: str
) -> None:
    async with bus_of(mesh, instance()) as bus:
        with pytest.raises(Refused, match=why):
            await register(bus, of_job(**changed))
        assert await known(bus, sid="j-s0-r0") == {}
        await register(bus, of_job())
        assert (await known(bus))["j-s0-r0"].job == "j"


async def test_who_calls_itself_of_another_kind_is_still_held_to_its_name(
    mesh: Guarded, registry: ServiceRegistry
) -> None:
    """The kind in an envelope is as much the sender's word as the body; the name is the server's."""
    record = of_module(kind=K.INSTANCE, job="j", stage=0, prefix="train/j/stage/0")
    async with bus_of(mesh, SMO) as bus, raw_connection(mesh.url, TOKENS[Role.RESEARCHER], ME) as attacker:
        told, forged = subjects.REGISTRATION(sid=ME), Sender(name=ME, kind=K.INSTANCE, incarnation="x")
        await ask(attacker, told, Registration(record=record), forged, "service-registry._")
        await until_answered(mesh)
        assert ME not in await known(bus)


@pytest.mark.parametrize("sid", ["orchestrator", "gateway-a", "a-n", "j-s0-r0", "mine"])
async def test_a_node_agent_registers_nobody_but_itself(
    mesh: Guarded, registry: ServiceRegistry, sid: str
) -> None:
    """A new incarnation fences the present one for good: the orchestrator's, too."""
    record = of_job().model_copy(update={"sid": sid, "incarnation": "forged", "endpoint": THERE})
    async with bus_of(mesh, OTHER_AGENT) as agent:
        with pytest.raises(Refused):  # by the server: the subject is not its own
            await register(agent, record)
        for state in (S.ACTIVE, S.FAULTED):
            kind = K.INSTANCE if sid == "j-s0-r0" else K.ORCHESTRATOR
            forged = record.model_copy(update={"state": state, "kind": kind, "endpoint": HERE})
            with pytest.raises(Refused):
                await register_for(agent, forged)
        assert sid not in await known(agent)


async def test_a_node_agent_ends_its_own_instances_alone(mesh: Guarded, registry: ServiceRegistry) -> None:
    async with (
        bus_of(mesh, AGENT) as agent,
        bus_of(mesh, OTHER_AGENT) as other,
        bus_of(mesh, instance()) as member,
        bus_of(mesh, SMO) as orchestrator,
    ):
        mine = of_job(incarnation=member.sender.incarnation)
        lead = service_record("orchestrator", prefix="entity/orchestrator", kind=K.ORCHESTRATOR)
        await register(member, mine)
        await register(orchestrator, lead)
        for record in (mine, lead):
            with pytest.raises(Refused, match=r"not of b-n|which b-n does not report"):
                await ended(other, record)
        replacing = mine.model_copy(update={"incarnation": "forged", "state": S.FAULTED, "endpoint": THERE})
        with pytest.raises(Refused, match="not of b-n"):
            await register_for(other, replacing)  # it would fence the living one
        assert {record.state for record in (await known(agent)).values() if record.sid != SRD.name} == {
            S.ACTIVE
        }
        await ended(agent, mine)
        assert (await known(agent))["j-s0-r0"].state is S.FAULTED
        # its unit is started again on the other node, and fails before it can register
        await register_for(other, replacing)
        assert (await known(agent))["j-s0-r0"].incarnation == "forged"


async def test_nobody_is_the_agent_whose_name_the_message_says(
    mesh: Guarded, registry: ServiceRegistry
) -> None:
    """NATS looks at no reply: with another's inbox there, the envelope may name that other as its sender."""
    change = StateChange(sid="j-s0-r0", incarnation="i1", state=S.FAULTED, reason="forged")
    forged = Sender(name="a-n", kind=K.CLUSTER, incarnation="x")
    token = bus_token(mesh, OTHER_AGENT)
    async with (
        bus_of(mesh, instance()) as member,
        raw_connection(mesh.url, token, "b-n", K.CLUSTER) as attacker,
    ):
        await register(member, of_job())
        told = subjects.INSTANCE_STATE(agent="b-n", sid="j-s0-r0")
        await ask(attacker, told, change, forged, "service-registry._")
        await until_answered(mesh)
        assert (await known(member))["j-s0-r0"].state is S.ACTIVE


async def test_an_instance_speaks_for_itself_whatever_its_agent_says(
    mesh: Guarded, registry: ServiceRegistry
) -> None:
    """It hands its credential on to nobody, and its agent's subjects are not its own."""
    async with bus_of(mesh, instance()) as member:
        await register(member, of_job())
        for row, said in (
            (subjects.INSTANCE_RECORD, Registration(record=of_job(state=S.FAULTED))),
            (subjects.INSTANCE_STATE, StateChange(sid="j-s1-r0", incarnation="i1", state=S.FAULTED)),
        ):
            with pytest.raises(Refused):
                await member.command(row, said, deadline_s=PATIENCE_S, agent="a-n", sid="j-s1-r0")


def bus_token(mesh: Guarded, who: Identity) -> str:
    return of_agent(mesh, who) if who.kind is K.INSTANCE else issue(mesh.root, who)


async def ask(attacker: Any, subject: str, message: Message, sender: Sender, answerer: str) -> None:
    """A request as a client of one's own makes it: the answer goes to the sender that it names."""
    payload = codec.encode(message, codec.sender_map(sender), "forged-1")
    question = reply_subjects.question(subject, payload, answerer)
    reply = f"_INBOX.{sender.kind}.{sender.name}.{'0' * 16}.{answerer}.{question}"
    attacker.writer.write(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
    await attacker.until_pong()


async def until_answered(mesh: Guarded) -> None:
    """The registry answers in order of arrival: what was asked before this has been decided."""
    async with bus_of(mesh, Identity(name="c-n", kind=K.CLUSTER, cluster="c", node="n")) as last:
        endpoint = Endpoint(cluster="c", node="n")
        record = service_record("c-n", prefix="entity/cluster/c", kind=K.CLUSTER, endpoint=endpoint)
        await register(last, record)
        with contextlib.suppress(NotFound):
            await ended(last, of_job("k-s0-r0"))
