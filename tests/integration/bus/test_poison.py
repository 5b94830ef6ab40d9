"""Unusable messages: counted, told once, kept as dead letters; the service goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgpack
import pytest
import structlog

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.wire import codec
from schemas.envelope import EntityKind, Sender
from schemas.errors import Ack, BadMessage, DmscError
from schemas.step import Member, MicrobatchClaim, StepStatus, StepStatusReply
from schemas.telemetry import DeadLetter
from tests.conftest import Connect
from tests.integration.bus.records import Collector, heartbeat, state_change
from tests.patience import PATIENCE_S
from tests.raw_requests import raw_request
from tests.waiting import eventually

SENDER = codec.sender_map(Sender(name="x", kind=EntityKind.CLIENT, incarnation="i"))


def envelope(**changes) -> bytes:
    """A well-formed state change, with some of its envelope's fields replaced."""
    fields = {
        "type": "registry.state",
        "version": (1, 0),
        "id": "i-1",
        "causation": None,
        "sender": SENDER.fields,
        "sent_at": 1.0,
        "body": state_change().model_dump(),
    }
    return msgpack.packb(fields | changes)


POISON = {
    "malformed": b"\xc1 not msgpack",
    "truncated": envelope()[:-7],
    "empty": b"",
    "a number": msgpack.packb(7),
    "a list": msgpack.packb([1, 2, 3]),
    "no envelope": msgpack.packb({"hello": "world"}),
    "deep": b"\x91" * 100_000,
    "a huge length": b"\xdd\xff\xff\xff\xff",
    "unknown type": envelope(type="nobody.knows"),
    "another type": codec.encode(heartbeat(), SENDER, "i-2"),
    "wrong major": envelope(version=(2, 0)),
    "wrong field type": envelope(body={**state_change().model_dump(), "state": "no such state"}),
    "missing field": envelope(body={"sid": "a"}),
    "unknown field of our own version": envelope(body={**state_change().model_dump(), "extra": 1}),
}


@pytest.mark.parametrize("name", POISON)
async def test_a_poisonous_request_is_answered_counted_and_kept(connect: Connect, name: str) -> None:
    service, sender, reader = await connect("service"), await connect("sender"), await connect("reader")
    letters = Collector()
    await reader.subscribe(subjects.DEAD_LETTER, letters, sid="service")

    async def handler(message, envelope):
        return Ack(note="alive")

    await service.serve(subjects.STATE_CHANGE, handler)
    subject = subjects.STATE_CHANGE(sid="a")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            reply = await raw_request(sender.raw, subject, POISON[name], timeout_s=PATIENCE_S)
            answer, _ = codec.decode(reply.data)
            assert answer.code == "bad_message"
    assert service.counters.dead_letters == 3
    assert len([line for line in logs if line["event"] == "unusable message"]) == 1
    await letters.until(3)
    assert isinstance(letters.items[0], DeadLetter)
    assert letters.items[0].size == len(POISON[name])
    assert letters.items[0].head == POISON[name][:1024]
    assert letters.items[0].subject == subject
    with pytest.raises(BadMessage):
        codec.decode(POISON[name], subjects.STATE_CHANGE.schema)
    assert (await sender.request(subjects.STATE_CHANGE, state_change(), sid="a")).note == "alive"


async def test_a_subscription_survives_poison_between_good_messages(connect: Connect) -> None:
    listener, sender = await connect("listener"), await connect("sender")
    seen = Collector()
    await listener.subscribe(subjects.HEARTBEAT, seen)
    for number in range(10):
        await sender.raw.publish(subjects.HEARTBEAT(sid="a"), b"\xc1")
        await sender.publish(subjects.HEARTBEAT, heartbeat(str(number)), sid="a")
    await seen.until(10)
    assert listener.counters.dead_letters == 10


async def test_an_oversized_message_is_a_dead_letter_too(tmp_path: Path) -> None:
    """Our own senders refuse it; a foreign one on a server with a higher limit may get it through."""
    async with (
        EmbeddedServer(tmp_path, sync_always=False, max_payload_bytes=16 << 20) as server,
        Bus.connect(server.url, name="service", kind=EntityKind.CLIENT) as service,
        Bus.connect(server.url, name="sender", kind=EntityKind.CLIENT) as sender,
    ):

        async def handler(message, envelope):
            return Ack(note="alive")

        await service.serve(subjects.STATE_CHANGE, handler)
        big = msgpack.packb({"body": "x" * (10 << 20)})
        reply = await raw_request(sender.raw, subjects.STATE_CHANGE(sid="a"), big, timeout_s=PATIENCE_S)
        answer, _ = codec.decode(reply.data)
        assert answer.code == "bad_message"
        assert "bytes" in answer.text
        assert service.counters.dead_letters == 1
        assert (await sender.request(subjects.STATE_CHANGE, state_change(), sid="a")).note == "alive"


async def test_an_answer_that_is_too_large_is_not_read_counted_and_told_once(connect: Connect) -> None:
    """Valid to the last byte: 5 MB of claims took a fifth of a second to read."""
    asker, instance, reader = await connect("asker"), await connect("instance"), await connect("reader")
    member = Member(sid="m", incarnation="i")
    claim = MicrobatchClaim(
        job="j", epoch=1, step=1, attempt=1, microbatch=1, stage=1, owner=member, upstream="m"
    )
    count, sent = 30_000, 0

    async def answers(message) -> None:
        nonlocal sent
        sent += 1
        account = StepStatusReply(member=member, version=1, attempt=1, claims=(claim,) * count)
        await instance.connection.send(message.reply, codec.encode(account, instance.sender_map, f"a{sent}"))

    await instance.connection.subscribe(subjects.STEP_STATUS(job="j", sid="m"), answers)
    letters = Collector()
    await reader.subscribe(subjects.DEAD_LETTER, letters)

    async def ask():
        return await asker.command(
            subjects.STEP_STATUS,
            StepStatus(job="j", epoch=1, step=1, attempt=1),
            job="j",
            sid="m",
            deadline_s=PATIENCE_S,
        )

    with structlog.testing.capture_logs() as logs:
        for number in (1, 2):
            with pytest.raises(
                BadMessage, match=r"step status: an answer of \d,\d+,\d+ bytes, where 2,097,152"
            ):
                await ask()
            assert asker.counters.dead_letters == number
    assert len([line for line in logs if line["event"] == "unusable message"]) == 1
    await letters.until(2)
    assert {letter.service for letter in letters.items} == {"asker"}
    assert {letter.subject for letter in letters.items} == {subjects.STEP_STATUS(job="j", sid="m")}
    assert {letter.head for letter in letters.items} == {b""}
    count = 3
    assert len((await ask()).claims) == 3


async def test_a_service_sends_no_answer_that_nobody_would_read(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")

    async def talkative(message, envelope):
        return Ack(note="x" * (1 << 20))

    await service.serve(subjects.STATE_CHANGE, talkative)
    with pytest.raises(DmscError, match=r"the service failed: state change: an answer of .* are the most"):
        await asker.request(subjects.STATE_CHANGE, state_change(), timeout_s=PATIENCE_S, sid="a")
    assert asker.counters.dead_letters == 0


async def test_dead_letters_are_on_their_stream(connect: Connect) -> None:
    service = await connect("kept")
    seen = Collector()
    await service.subscribe(subjects.HEARTBEAT, seen)
    await service.raw.publish(subjects.HEARTBEAT(sid="a"), b"rubbish")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = [item async for item in service.history(subjects.DEAD_LETTER, sid="kept")]
            if found:
                break
            await asyncio.sleep(0.01)
    assert found[0].message.head == b"rubbish"


async def test_an_unusable_dead_letter_breeds_no_other(connect: Connect) -> None:
    reader = await connect("reader")
    seen = Collector()
    await reader.subscribe(subjects.DEAD_LETTER, seen)
    await reader.raw.publish(subjects.DEAD_LETTER(sid="x"), b"rubbish")
    await reader.barrier()
    await eventually(lambda: reader.counters.dead_letters >= 1)
    await reader.barrier()
    await reader.barrier()
    assert reader.counters.dead_letters == 1
    assert seen.items == []


async def test_a_newer_minor_version_is_understood(connect: Connect) -> None:
    service, sender = await connect("service"), await connect("sender")
    seen = Collector()

    async def handler(message, envelope):
        await seen(message)
        return Ack()

    await service.serve(subjects.STATE_CHANGE, handler)
    newer = envelope(version=(1, 7), body={**state_change("new").model_dump(), "added": {"later": 1}})
    reply = await raw_request(sender.raw, subjects.STATE_CHANGE(sid="a"), newer, timeout_s=PATIENCE_S)
    assert isinstance(codec.decode(reply.data)[0], Ack)
    assert seen.items == [state_change("new")]
    assert service.counters.dead_letters == 0


async def test_a_flood_of_poison_does_not_stop_the_service(connect: Connect) -> None:
    service, sender = await connect("service"), await connect("sender")

    async def handler(message, envelope):
        return Ack()

    await service.serve(subjects.STATE_CHANGE, handler)
    for _ in range(2_000):
        await sender.raw.publish(subjects.STATE_CHANGE(sid="a"), b"\xc1")
    await sender.command(subjects.STATE_CHANGE, state_change(), sid="a", deadline_s=PATIENCE_S)
    assert service.counters.dead_letters == 2_000
