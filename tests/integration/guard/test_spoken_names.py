"""What the server lets through on a sender's own subject speaks of that sender, or nobody handles it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.nats import reply_subjects
from bus.security.credentials import issue
from bus.security.identity import Identity
from bus.subject_row import Subject
from bus.wire import codec
from schemas.base import Message
from schemas.cluster import AnalysisFailed, NodeStatus
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope, Sender
from schemas.errors import Ack
from schemas.fault import FaultReport, LinkFault
from schemas.names import MESH
from schemas.policy import AvoidInstance, ModuleLifecycle, ModuleState, PolicySuggestion
from schemas.registry import Endpoint, Heartbeat, InstanceState, StateChange
from schemas.services.figures import ServiceFigures
from schemas.signals import NodeRegistration, QosReport, Role
from schemas.step import Member, MicrobatchClaim
from schemas.telemetry import NodeSample
from tests.builders.telemetry import linked_sample
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.raw_connection import raw_connection
from tests.integration.guard.test_threats import (
    AGENT,
    GATEWAY,
    MODULE,
    ROUTER,
    SMO,
    SRD,
    bus_of,
    instance,
    of_agent,
)
from tests.patience import PATIENCE_S
from tests.waiting import eventually

OWN, OTHER = "j-s0-r0", "k-s0-r0"
RESEARCHERS = f"{Role.RESEARCHER}-one"
"""The researcher, and a module of theirs."""
BEAT = Heartbeat(sid=OTHER, incarnation="x", state=InstanceState.FAULTED, digest="0")
CHANGE = StateChange(sid=OTHER, incarnation="x", state=InstanceState.FAULTED, reason="forged")
CLAIM = MicrobatchClaim(
    job="k",
    epoch=1,
    step=1,
    attempt=0,
    microbatch=0,
    stage=0,
    upstream="x",
    owner=Member(sid=OTHER, incarnation="x"),
)
STATUS = NodeStatus(
    sid="a-n", cluster="b", node="n", incarnation="x", slots=(), address="127.0.0.1", warm=True
)
REGISTRATION = NodeRegistration(
    sid="router-a", kind=K.ROUTER, incarnation="x", endpoint=Endpoint(cluster="b", node="n")
)
REPORT = QosReport(sid="router-a", cluster="b", window_s=1.0)
FAULT = FaultReport(
    reporter="router-b", job="j", sid=OWN, incarnation="x", kind="instance", evidence="forged"
)
LINK = LinkFault(
    job="j", reporter=OWN, reporter_incarnation="x", peer=OTHER, peer_incarnation="x", text="forged"
)
FIGURES = ServiceFigures(gateway="gateway-b", since=1.0, versions=())
LIFECYCLE = ModuleLifecycle(module="mine", version="1", state=ModuleState.ACTIVE, sid="another")


@pytest.mark.parametrize(
    ("row", "listener", "speaker", "name", "forged", "tokens"),
    [
        (subjects.HEARTBEAT, SRD, instance(), OTHER, BEAT, {"sid": OWN}),
        (subjects.HEARTBEAT, SRD, instance(), OTHER, BEAT.model_copy(update={"sid": OWN}), {"sid": OWN}),
        (subjects.STATE_CHANGE, SRD, instance(), OWN, CHANGE, {"sid": OWN}),
        (subjects.STATE_CHANGE, SRD, instance(), OTHER, CHANGE.model_copy(update={"sid": OWN}), {"sid": OWN}),
        (subjects.INSTANCE_STATE, SRD, AGENT, "a-n", CHANGE, {"agent": "a-n", "sid": OWN}),
        (subjects.INSTANCE_STATE, SRD, AGENT, "b-n", CHANGE, {"agent": "a-n", "sid": OTHER}),
        (subjects.STEP_CLAIM, SMO, instance(), OTHER, CLAIM, {"job": "j", "sid": OWN}),
        (subjects.NODE_STATUS, SMO, AGENT, "a-n", STATUS, {"sid": "a-n"}),
        (subjects.NODE_SAMPLE, SMO, AGENT, "a-n", NodeSample(cluster="b", node="n"), {"agent": "a-n"}),
        (
            subjects.ANALYSIS_FAILED,
            SMO,
            AGENT,
            "b-n",
            AnalysisFailed(job="j", code="x", text="forged"),
            {"agent": "a-n", "job": "j"},
        ),
        (subjects.MESH_REGISTRATION, SMO, ROUTER, "router-a", REGISTRATION, {"sid": "router-a"}),
        (subjects.QOS_REPORT, SMO, ROUTER, "router-a", REPORT, {"sid": "router-a"}),
        (subjects.FAULT_REPORT, SMO, ROUTER, "router-a", FAULT, {"sid": "router-a"}),
        (subjects.LINK_FAULT, ROUTER, instance(), OWN, LINK, {"cluster": "a", "job": "j"}),
        (
            subjects.LINK_FAULT,
            ROUTER,
            instance(),
            OWN,
            LINK.model_copy(update={"job": "k"}),
            {"cluster": "a", "job": "j"},
        ),
        (
            subjects.LINK_FAULT,
            ROUTER,
            instance(),
            OWN,
            LINK.model_copy(update={"reporter": OTHER, "peer": "j-s1-r0"}),
            {"cluster": "a", "job": "j"},
        ),
        (subjects.SERVICE_FIGURES, SMO, GATEWAY, "gateway-a", FIGURES, {"gateway": "gateway-a"}),
        (
            subjects.SERVICE_FIGURES,
            SMO,
            GATEWAY,
            "gateway-b",
            FIGURES.model_copy(update={"gateway": "gateway-a"}),
            {"gateway": "gateway-a"},
        ),
        (subjects.MODULE_LIFECYCLE, SMO, MODULE, "mine", LIFECYCLE, {"owner": MESH, "module": "mine"}),
    ],
)
async def test_nobody_is_spoken_of_in_anothers_name(
    mesh: Guarded,
    row: Subject,
    listener: Identity,
    speaker: Identity,
    name: str,
    forged: Message,
    tokens: dict[str, Any],
) -> None:
    """`name`: of the envelope's sender, and of the inbox for the answer; both are the speaker's word."""
    handled: list[Message] = []

    async def handle(message: Message, envelope: Envelope) -> Ack:
        handled.append(message)
        return Ack()

    sender = codec.sender_map(Sender(name=name, kind=speaker.kind, incarnation="x"))
    token = of_agent(mesh, speaker) if speaker.kind is K.INSTANCE else issue(mesh.root, speaker)
    async with (
        bus_of(mesh, listener) as bus,
        raw_connection(mesh.url, token, speaker.name, speaker.kind) as attacker,
    ):
        listen = bus.serve if row.reply is not None else bus.subscribe
        await listen(row, handle, **{key: value for key, value in tokens.items() if key == "cluster"})
        payload = codec.encode(forged, sender, "forged-1")
        subject, answerer = row(**tokens), row.answerer(tokens)
        question = reply_subjects.question(subject, payload, answerer)
        reply = f"_INBOX.{speaker.kind}.{name}.{'0' * 16}.{answerer}.{question}"
        attacker.writer.write(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
        await attacker.until_pong()
        await eventually(lambda: bus.counters.dead_letters)
    assert handled == []


async def test_who_speaks_of_itself_is_heard(mesh: Guarded) -> None:
    heard: asyncio.Queue[Heartbeat] = asyncio.Queue()

    async def handle(message: Heartbeat, envelope: Envelope) -> None:
        heard.put_nowait(message)

    token = issue(mesh.root, instance())
    async with bus_of(mesh, SRD) as registry, bus_of(mesh, instance(), token) as bus:
        await registry.subscribe(subjects.HEARTBEAT, handle)
        await bus.publish(subjects.HEARTBEAT, BEAT.model_copy(update={"sid": OWN}), sid=OWN)
        async with asyncio.timeout(PATIENCE_S):
            assert (await heard.get()).sid == OWN


SUGGESTION = PolicySuggestion(
    module=RESEARCHERS,
    version="1",
    job="j",
    action=AvoidInstance(sid="k-s0-r0"),
    confidence=1.0,
    reason="why",
    input_revision=1,
    valid_s=60.0,
)


async def test_a_researchers_module_suggests_under_the_researchers_name(mesh: Guarded) -> None:
    heard: asyncio.Queue[PolicySuggestion] = asyncio.Queue()

    async def handle(message: PolicySuggestion, envelope: Envelope) -> None:
        heard.put_nowait(message)

    token = TOKENS[Role.RESEARCHER]
    async with (
        bus_of(mesh, SMO) as orchestrator,
        Bus.connect(mesh.url, name=RESEARCHERS, kind=K.FUNCTIONAL_MODULE, token=token) as module,
    ):
        await orchestrator.subscribe(subjects.SUGGESTION, handle)
        for owner in (MESH, "bob", RESEARCHERS):  # in the message; the subject is the server's
            said = SUGGESTION.model_copy(update={"owner": owner})
            await module.publish(subjects.SUGGESTION, said, owner=RESEARCHERS, module=RESEARCHERS)
        async with asyncio.timeout(PATIENCE_S):
            assert (await heard.get()).owner == RESEARCHERS
        assert heard.empty()
        assert orchestrator.counters.dead_letters == 2


async def test_what_a_stream_has_kept_speaks_of_nobody_else_either(mesh: Guarded) -> None:
    """Modules and orchestrators rebuild what they know from streams, which keep whatever was let through."""
    sample = linked_sample(OTHER)
    async with (
        bus_of(mesh, instance()) as member,
        bus_of(mesh, Identity(name="tap", kind=K.TAP), mesh.root) as reader,
    ):
        await member.publish(subjects.INSTANCE_SAMPLE, sample, job="j", sid=OWN)
        own = linked_sample(OWN)
        await member.publish(subjects.INSTANCE_SAMPLE, own, job="j", sid=OWN)
        # followed, because a stream records in its own time what was only published
        kept = reader.history(subjects.INSTANCE_SAMPLE, follow=True)
        async with contextlib.aclosing(kept), asyncio.timeout(PATIENCE_S):
            assert (await anext(kept)).message == own
        assert reader.counters.dead_letters == 1
