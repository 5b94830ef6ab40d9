"""Streams: acknowledged appends, ordered history, and core traffic recorded without a trace in it."""

from __future__ import annotations

import asyncio

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging import stream_specs
from bus.nats import jetstream
from bus.nats.dialer import ConnectionTimes
from bus.subject_row import ROOT
from schemas.envelope import EntityKind
from schemas.errors import NotFound
from schemas.policy import ModuleLifecycle
from schemas.telemetry import NodeSample
from tests.conftest import Connect
from tests.integration.bus.records import followed, job_event
from tests.waiting import eventually


async def test_append_is_acknowledged_and_deduplicated_by_id(connect: Connect) -> None:
    bus = await connect("a")
    first = await bus.append(subjects.JOB_EVENT, job_event("one"), message_id="m1", job="dedup")
    assert await bus.append(subjects.JOB_EVENT, job_event("one"), message_id="m1", job="dedup") == first
    second = await bus.append(subjects.JOB_EVENT, job_event("two"), job="dedup")
    assert second > first
    items = [item async for item in bus.history(subjects.JOB_EVENT, job="dedup")]
    assert [(item.sequence, item.message.text) for item in items] == [(first, "one"), (second, "two")]
    assert items[0].subject == subjects.JOB_EVENT(job="dedup")
    assert items[0].envelope.sender.name == "a"


async def test_history_from_a_position_and_of_one_subject(connect: Connect) -> None:
    bus = await connect("a")
    sequences = []
    for number in range(700):  # more than two batches
        job = "h1" if number % 2 else "h2"
        sequences.append(await bus.append(subjects.JOB_EVENT, job_event(str(number)), job=job))
    texts = [item.message.text async for item in bus.history(subjects.JOB_EVENT, job="h1")]
    assert texts == [str(number) for number in range(700) if number % 2]
    tail = [item.message.text async for item in bus.history(subjects.JOB_EVENT, start=sequences[690])]
    assert tail == [str(number) for number in range(690, 700)]
    assert [item async for item in bus.history(subjects.JOB_EVENT, job="never")] == []


async def test_follow_replays_and_goes_on_in_order(connect: Connect) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    for number in range(5):
        await alice.append(subjects.JOB_EVENT, job_event(str(number)), job="f")
    async with followed(bob, "f") as texts:
        for number in range(5, 10):
            await alice.append(subjects.JOB_EVENT, job_event(str(number)), job="f")
        await eventually(lambda: len(texts) == 10)
    assert texts == [str(number) for number in range(10)]


async def test_a_quiet_stream_is_followed_over_many_requests(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request for messages ends after a while; the next one takes over without a gap."""
    times = ConnectionTimes(pull_expires_s=0.3, pull_heartbeat_s=0.1)
    alice, bob = await connect("alice"), await connect("bob", connection_times=times)
    asked = 0
    send = bob.connection.send

    async def counting(subject: str, *args: object, **options: object) -> None:
        nonlocal asked
        asked += ".MSG.NEXT." in subject
        await send(subject, *args, **options)

    monkeypatch.setattr(bob.connection, "send", counting)
    async with followed(bob, "quiet") as texts:
        for number in range(3):
            before = asked
            await eventually(lambda before=before: asked >= before + 2)
            await alice.append(subjects.JOB_EVENT, job_event(str(number)), job="quiet")
            await eventually(lambda number=number: len(texts) == number + 1)
    assert texts == ["0", "1", "2"]


async def test_a_followed_stream_whose_consumer_vanished_goes_on(connect: Connect) -> None:
    alice = await connect("alice")
    async with followed(alice, "vanish") as texts:
        await alice.append(subjects.JOB_EVENT, job_event("one"), job="vanish")
        await eventually(lambda: texts == ["one"])
        consumers = (await jetstream.call(alice.connection, "CONSUMER.NAMES.JOBS"))["consumers"]
        assert consumers
        for consumer in consumers:
            await jetstream.call(alice.connection, f"CONSUMER.DELETE.JOBS.{consumer}")
        await alice.append(subjects.JOB_EVENT, job_event("two"), job="vanish")
        await eventually(lambda: texts == ["one", "two"])


async def test_a_row_without_a_stream_has_no_history(connect: Connect) -> None:
    bus = await connect("a")
    with pytest.raises(NotFound):
        async for _ in bus.history(subjects.HEARTBEAT):
            pass


async def test_recording_core_traffic_does_not_answer_requests(connect: Connect) -> None:
    """A stream that acknowledged would be the first to answer a request on a recorded subject."""
    bus = await connect("a")
    recorded = [spec for spec in stream_specs.STREAMS if not spec.acknowledged]
    assert recorded
    for spec in recorded:
        info = await jetstream.call(bus.connection, f"STREAM.INFO.{spec.name}")
        assert info["config"]["no_ack"] is True
        assert info["config"]["storage"] == ("memory" if spec.name == "GENERATIONS" else "file")
        assert info["config"]["discard"] == "old"
    sample = NodeSample(cluster="c", node="n")
    await bus.publish(subjects.NODE_SAMPLE, sample, agent="c-n")
    async for item in bus.history(subjects.NODE_SAMPLE, follow=True, agent="c-n"):
        assert item.message == sample
        break
    with bus.connection.question("probe") as (inbox, asked):
        await bus.connection.send(subjects.NODE_SAMPLE(agent="c-n"), b"x", reply=inbox)
        await bus.barrier()
        await bus.barrier()
        assert not asked.answer.done()
    assert ModuleLifecycle.wire_type  # a request row whose traffic no stream may answer


async def test_two_services_provision_at_once_and_the_counters_count(connect: Connect) -> None:
    buses = [await connect(f"p{index}") for index in range(3)]
    await asyncio.gather(*(bus.provision() for bus in buses))
    names = {f"KV_{bucket}" for bucket in stream_specs.BUCKETS} | {spec.name for spec in stream_specs.STREAMS}
    for name in names | {"KV_rendezvous", "RENDEZVOUS_COUNTERS", "OBJ_artifacts"}:
        await jetstream.call(buses[0].connection, f"STREAM.INFO.{name}")
    subject = f"{ROOT}.rendezvous.counter.test"
    for _ in range(3):
        await jetstream.publish(buses[0].connection, subject, b"", {"Nats-Incr": "2"})
    last = await jetstream.last(buses[0].connection, "RENDEZVOUS_COUNTERS", subject, leader=True)
    assert b'"6"' in last.data


async def test_provision_adjusts_what_an_older_version_made(own_server) -> None:
    async with Bus.connect(own_server.url, name="a", kind=EntityKind.CLIENT) as bus:
        spec = next(spec for spec in stream_specs.STREAMS if spec.name == "LOGS")
        older = {"name": "LOGS", "subjects": list(spec.subjects), "max_bytes": 1 << 20, "storage": "file"}
        await jetstream.call(bus.connection, "STREAM.CREATE.LOGS", older)
        await bus.provision()
        info = await jetstream.call(bus.connection, "STREAM.INFO.LOGS")
        assert info["config"]["max_bytes"] == spec.max_bytes
