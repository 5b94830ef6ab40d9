"""What the server lets through on a sender's own subject speaks of that sender, or nobody handles it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus import codec, inboxes, subjects
from bus.credentials import issue
from bus.identity import Identity
from bus.subject import Subject
from schemas.base import Message
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope, Sender
from schemas.errors import Ack
from schemas.registry import Heartbeat, InstanceState, StateChange
from schemas.step import Member, MicrobatchClaim
from tests.integration.guard.conftest import Guarded
from tests.integration.guard.test_threats import SMO, SRD, bus_of, instance, of_agent
from tests.integration.guard.wire import wire
from tests.patience import PATIENCE_S

OWN, OTHER = "j-s0-r0", "k-s0-r0"
BEAT = Heartbeat(sid=OTHER, incarnation="x", state=InstanceState.FAULTED, digest="0")
CHANGE = StateChange(sid=OTHER, incarnation="x", state=InstanceState.FAULTED, reason="forged")
CLAIM = MicrobatchClaim(
    job="k", epoch=1, step=1, attempt=0, microbatch=0, stage=0, upstream="x",
    owner=Member(sid=OTHER, incarnation="x"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "listener", "forged", "tokens"),
    [
        (subjects.HEARTBEAT, SRD, BEAT, {"sid": OWN}),
        (
            subjects.HEARTBEAT,
            SRD,
            BEAT.model_copy(update={"sid": OWN}),
            {"sid": OWN},
        ),  # the sender is another
        (subjects.STATE_CHANGE, SRD, CHANGE, {"sid": OWN}),
        (subjects.STEP_CLAIM, SMO, CLAIM, {"job": "j", "sid": OWN}),
    ],
)
async def test_nobody_is_spoken_of_in_anothers_name(
    mesh: Guarded, row: Subject, listener: Identity, forged: Message, tokens: dict[str, Any]
) -> None:
    handled: list[Message] = []

    async def handle(message: Message, envelope: Envelope) -> Ack:
        handled.append(message)
        return Ack()

    # who asks must be who is answered (`bus.inboxes`), so that is no forgery
    name = OTHER if row.reply is None else OWN
    sender = codec.sender_map(Sender(name=name, kind=K.INSTANCE, incarnation="x"))
    async with bus_of(mesh, listener) as bus, wire(mesh.url, of_agent(mesh, instance()), OWN) as attacker:
        listen = bus.serve if row.reply is not None else bus.subscribe
        await listen(row, handle)
        payload = codec.encode(forged, sender, "forged-1")
        subject = row(**tokens)
        answerer = "service-registry._"
        reply = f"_INBOX.instance.{OWN}.{'0' * 16}.{answerer}.{inboxes.question(subject, payload, answerer)}"
        attacker.writer.write(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
        await attacker.until_pong()
        async with asyncio.timeout(PATIENCE_S):
            while bus.counters.dead_letters == 0:  # noqa: ASYNC110  # it has no event for it
                await asyncio.sleep(0.01)
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
