"""The tap on a real bus: it sees everything, disturbs nothing, and says what it lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.tap import rendering
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from bus.tap.microbatch_trace import Microbatch, MicrobatchTrace, recorded
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadInput
from schemas.registry import ReleaseJob
from schemas.step import Member, MicrobatchClaim
from schemas.telemetry import LogLine, NodeSample
from tests.patience import PATIENCE_S


@pytest.fixture
async def bus(own_server: EmbeddedServer) -> AsyncIterator[Bus]:
    async with Bus.connect(own_server.url, name="east-n1", kind=EntityKind.CLUSTER) as bus:
        await bus.provision()
        yield bus


@pytest.fixture
async def watcher(own_server: EmbeddedServer) -> AsyncIterator[Bus]:
    async with Bus.connect(own_server.url, name="tap-1", kind=EntityKind.TAP) as bus:
        yield bus


async def some(tap: Tap, count: int) -> list[TappedMessage]:
    found: list[TappedMessage] = []
    async with asyncio.timeout(PATIENCE_S):
        async for tapped in tap:
            found.append(tapped)
            if len(found) == count:
                break
    return found


def sample(cpu: float = 0.5) -> NodeSample:
    return NodeSample(cluster="east", node="n1", cpu=cpu)


async def test_it_sees_and_decodes_what_others_say_each_once(bus: Bus, watcher: Bus) -> None:
    async with Tap(watcher, ["telemetry.>", "telemetry.node.*", "log.>"]) as tap:
        await bus.publish(subjects.NODE_SAMPLE, sample(), agent="east-n1")
        await bus.publish(subjects.LOG, LogLine(level="info", event="hello"), sid="east-n1")
        first, second = await some(tap, 2)
    assert first.message == sample()
    assert first.envelope is not None
    assert first.envelope.sender.name == "east-n1"
    assert second.row is subjects.LOG
    assert (tap.seen, tap.dropped) == (2, 0)


async def test_filters_leave_the_rest_out(bus: Bus, watcher: Bus) -> None:
    async with Tap(watcher, ["telemetry.>"], filters=["cpu>0.8", "sender.name=east-*"]) as tap:
        for cpu in (0.1, 0.9, 0.2, 1.0):
            await bus.publish(subjects.NODE_SAMPLE, sample(cpu), agent="east-n1")
        assert [tapped.message.cpu for tapped in await some(tap, 2)] == [0.9, 1.0]
    with pytest.raises(BadInput, match="has a field 'cpus'; close ones: cpu"):
        Tap(watcher, ["telemetry.>"], filters=["cpus>0.8"])


async def test_a_flood_is_dropped_here_counted_and_felt_by_nobody(bus: Bus, watcher: Bus) -> None:
    received = 0
    complete = asyncio.Event()

    async def take(message: NodeSample, envelope: Envelope) -> None:
        nonlocal received
        received += 1
        if received == 5000:
            complete.set()

    await bus.subscribe(subjects.NODE_SAMPLE, take)
    async with Tap(watcher, ["telemetry.>"], limit=100) as tap:
        for _ in range(5000):
            await bus.publish(subjects.NODE_SAMPLE, sample(), agent="east-n1")
        async with asyncio.timeout(PATIENCE_S):
            await complete.wait()
            await watcher.barrier()
        found = await some(tap, 50)
        assert len(found) == 50
        assert tap.dropped >= 4000, "the flood must have been one"
        assert tap.seen + tap.dropped >= 5000
        assert (
            f"{tap.dropped:,} dropped"
            in rendering.render_rates(tap.rates(), seen=tap.seen, dropped=tap.dropped)[-1]
        )
        [rate] = tap.rates()
        assert rate.name == "node sample"
        assert rate.total == tap.seen
        assert rate.per_s > 100


async def test_damaged_messages_are_shown_as_such(bus: Bus, watcher: Bus) -> None:
    async with Tap(watcher, [">"]) as tap:
        await bus.raw.publish(subjects.LOG(sid="x"), b"\x83\xa4type")
        await bus.raw.publish("dmsc.v1.no.such.subject", b"hello")
        broken, unknown = await some(tap, 2)
    assert "not msgpack" in broken.problem
    assert unknown.row is None
    assert b"hello" in unknown.raw


async def test_requests_are_seen_and_their_answers_if_wanted(bus: Bus, watcher: Bus) -> None:
    answered = 0

    async def release(message: ReleaseJob, envelope: Envelope) -> Ack:
        nonlocal answered
        answered += 1
        return Ack(note="gone")

    await bus.serve(subjects.RELEASE_JOB, release)
    async with Tap(watcher, ["registry.>"], replies=True) as tap:
        await bus.request(subjects.RELEASE_JOB, ReleaseJob(job="j"))
        request, reply = await some(tap, 2)
    assert answered == 1  # by the service alone
    assert request.message == ReleaseJob(job="j")
    assert reply.message == Ack(note="gone")
    assert reply.answers == "dmsc.v1.registry.release"
    assert reply.latency_ms is not None
    assert "reply to release job after" in str(rendering.render(reply))


async def test_a_tap_alone_makes_no_responder(bus: Bus, own_server: EmbeddedServer, watcher: Bus) -> None:
    """It listens to requests like a service, but never answers: the asker waits for one that does."""
    async with Tap(watcher, ["registry.>"]) as tap:
        asking = asyncio.create_task(
            bus.command(subjects.RELEASE_JOB, ReleaseJob(job="j"), deadline_s=PATIENCE_S)
        )
        await some(tap, 1)

        async def release(message: ReleaseJob, envelope: Envelope) -> Ack:
            return Ack()

        await bus.serve(subjects.RELEASE_JOB, release)
        assert await asking == Ack()


async def test_key_value_changes(bus: Bus, watcher: Bus) -> None:
    from schemas.data_plane import RouteTable

    table = RouteTable(job="j", cluster="east", stage=0, revision=1, router="router-east", entries=())
    key = {"job": "j", "cluster": "east", "stage": 0}
    async with Tap(watcher, ["$KV.routes.>"]) as tap:
        await bus.bucket(subjects.ROUTE_TABLE).put(table, **key)
        await bus.bucket(subjects.ROUTE_TABLE).delete(**key)
        put, deleted = await some(tap, 2)
    assert put.message == table
    assert deleted.note == "deleted"


async def test_a_microbatch_is_followed_also_when_it_has_gone_by(bus: Bus, watcher: Bus) -> None:
    async def claim(microbatch: int, stage: int) -> None:
        owner = Member(sid=f"j-s{stage}-r0", incarnation="i1")
        message = MicrobatchClaim(
            job="j", epoch=1, step=3, attempt=0, microbatch=microbatch, stage=stage, owner=owner, upstream="u"
        )
        await bus.publish(subjects.STEP_CLAIM, message, job="j", sid=owner.sid)

    wanted = Microbatch.parse("j/3/1")
    live = MicrobatchTrace(wanted)
    async with Tap(watcher, wanted.patterns()) as tap:
        for microbatch, stage in ((0, 1), (1, 1), (0, 0), (1, 0)):
            await claim(microbatch, stage)
        for tapped in await some(tap, 4):
            live.add(tapped)
    assert [hop.what for hop in live.hops] == ["claim", "claim"]
    assert live.complete
    await bus.barrier()
    later = MicrobatchTrace(wanted)
    later.add_all(await recorded(watcher, wanted))
    assert [hop.text for hop in later.hops] == [hop.text for hop in live.hops]
