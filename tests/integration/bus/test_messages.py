"""Publish, request, serve: order, concurrency, bounds, barriers, errors across the wire."""

from __future__ import annotations

import asyncio

import pytest

from bus import subjects
from bus.wire.correlation import correlated
from schemas.errors import Ack, BadMessage, DeadlineExceeded, DmscError, NoResponders, NotFound
from schemas.telemetry import NodeSample
from tests.conftest import Connect
from tests.integration.bus.records import Collector, heartbeat, state_change
from tests.patience import PATIENCE_S


async def test_typed_message_arrives_with_its_envelope(connect: Connect) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    got: list[tuple[object, object]] = []

    async def handler(message, envelope):
        got.append((message, envelope))

    await bob.subscribe(subjects.HEARTBEAT, handler)
    sent_id = await alice.publish(subjects.HEARTBEAT, heartbeat("x"), sid="a", cause="cause-1")
    await alice.barrier()
    await bob.barrier()
    await asyncio.sleep(0)
    [(message, envelope)] = got
    assert message == heartbeat("x")
    assert (envelope.id, envelope.causation) == (sent_id, "cause-1")
    assert (envelope.sender, envelope.type) == (alice.sender, "registry.heartbeat")


async def test_the_connection_by_its_former_name(connect: Connect) -> None:
    alice = await connect("alice")
    with pytest.warns(DeprecationWarning, match=r"Bus\.connection"):
        assert alice.link is alice.connection


async def test_what_one_says_oneself_need_not_be_read(connect: Connect) -> None:
    alice, seen = await connect("alice"), Collector()
    await alice.subscribe(subjects.HEARTBEAT, seen, ignored=subjects.HEARTBEAT(sid="a"))
    await alice.publish(subjects.HEARTBEAT, heartbeat("x"), sid="a")
    await alice.publish(subjects.HEARTBEAT, heartbeat("y"), sid="b")
    await seen.until(1)
    assert seen.items == [heartbeat("y")]


async def test_what_a_handler_sends_and_starts_names_the_message_that_it_handles(connect: Connect) -> None:
    """Also by another connection, also from a task; the answer; not what comes after an unusable message."""
    asker, service, witness = await connect("asker"), await connect("service"), await connect("witness")
    seen = Collector()
    started: list[asyncio.Task[str]] = []

    async def handler(message, envelope):
        await service.publish(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), agent="own")
        later = service.publish(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), agent="later")
        started.append(asyncio.create_task(later))
        return Ack()

    await service.serve(subjects.STATE_CHANGE, handler, sid="a", concurrency=1)
    await witness.subscribe(subjects.NODE_SAMPLE, seen)
    await witness.subscribe(subjects.DEAD_LETTER, seen)
    with correlated("c1"):
        await asker.request(subjects.STATE_CHANGE, state_change(), sid="a")
    await asyncio.gather(*started)
    await asker.raw.publish(subjects.STATE_CHANGE(sid="a"), b"rubbish")
    await seen.until(3)
    own, later, letter = seen.envelopes
    assert own.causation == later.causation == f"{asker.sender.incarnation}-1"
    assert own.correlation == later.correlation == "c1"
    assert (letter.causation, letter.correlation) == (None, None)


async def test_barrier_waits_for_what_is_still_pending(connect: Connect) -> None:
    """nats-py's flush() returns while published messages still wait in the client; barrier() does not."""
    alice, bob = await connect("alice"), await connect("bob")
    seen = Collector()
    await bob.subscribe(subjects.HEARTBEAT, seen)
    waited = 0
    for number in range(1_000):
        await alice.publish(subjects.HEARTBEAT, heartbeat(str(number)), sid="a")
        waited = max(waited, alice.raw.pending_data_size)
    assert waited > 0  # the fault is there to be caught
    await alice.barrier()
    assert alice.raw.pending_data_size == 0
    await bob.barrier()
    await seen.until(1_000)
    assert [item.digest for item in seen.items] == [str(number) for number in range(1_000)]


async def test_a_tight_publishing_loop_leaves_the_event_loop_its_turns(connect: Connect) -> None:
    alice = await connect("alice")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(200_000):  # seconds; it has its turns after some hundred
        await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
        if turns >= 10:
            break
    task.cancel()
    assert turns >= 10


async def test_errors_reach_the_asker_as_the_same_class(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")

    async def handler(message, envelope):
        if message.reason == "known":
            raise NotFound("no such thing", job="j1")
        raise RuntimeError("secret detail")

    await service.serve(subjects.STATE_CHANGE, handler)
    with pytest.raises(NotFound, match="no such thing") as known:
        await asker.request(subjects.STATE_CHANGE, state_change("known"), sid="a")
    assert known.value.fields == {"job": "j1"}
    with pytest.raises(DmscError) as unknown:
        await asker.request(subjects.STATE_CHANGE, state_change("unknown"), sid="a")
    assert unknown.value.code == "internal"
    assert "secret" not in unknown.value.text
    assert service.counters.handler_errors == 1


async def test_nobody_there_and_no_answer_are_told_apart(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    with pytest.raises(NoResponders):
        await asker.request(subjects.STATE_CHANGE, state_change(), sid="nobody")
    release = asyncio.Event()

    async def slow(message, envelope):
        await release.wait()
        return Ack()

    await service.serve(subjects.STATE_CHANGE, slow, sid="slow")
    with pytest.raises(DeadlineExceeded):
        await asker.request(subjects.STATE_CHANGE, state_change(), timeout_s=0.2, sid="slow")
    release.set()


async def test_a_repeated_request_is_heard_by_who_comes_late_and_handled_once(connect: Connect) -> None:
    """A tap hears the first one, so that the server does not say that nobody does."""
    asker, service, tap = await connect("asker"), await connect("service"), await connect("tap")
    heard = Collector()
    await tap.subscribe(subjects.STATE_CHANGE, heard)
    asking = asyncio.create_task(
        asker.request(subjects.STATE_CHANGE, state_change(), sid="a", repeat_s=0.05, timeout_s=PATIENCE_S)
    )
    await heard.until(1)
    runs = 0

    async def handler(message, envelope):
        nonlocal runs
        runs += 1
        await heard.until(len(heard.items) + 2)
        return Ack(note="late")

    await service.serve(subjects.STATE_CHANGE, handler)
    assert (await asking).note == "late"
    assert runs == 1
    assert len(heard.items) >= 3


async def test_handlers_of_one_subscription_run_side_by_side(connect: Connect) -> None:
    """nats-py runs the callbacks of one subscription one after the other; here `concurrency` says."""
    asker, service = await connect("asker"), await connect("service")
    running = 0
    most = 0
    full = asyncio.Event()

    async def handler(message, envelope):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 8:
            full.set()
        await full.wait()
        await asyncio.sleep(0)
        running -= 1
        return Ack()

    await service.serve(subjects.STATE_CHANGE, handler, concurrency=8)
    asked = [asker.request(subjects.STATE_CHANGE, state_change(), sid="a") for _ in range(32)]
    assert len(await asyncio.gather(*asked)) == 32
    assert most == 8


async def test_concurrency_one_keeps_the_order(connect: Connect) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    seen: list[str] = []

    async def handler(message, envelope):
        await asyncio.sleep(0.002 if message.digest == "0" else 0)
        seen.append(message.digest)

    subscription = await bob.subscribe(subjects.HEARTBEAT, handler)
    for number in range(50):
        await alice.publish(subjects.HEARTBEAT, heartbeat(str(number)), sid="a")
    await alice.barrier()
    await subscription.stop()
    assert seen == [str(number) for number in range(50)]


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_stop_drains_what_has_arrived_and_twice_is_fine(connect: Connect, concurrency: int) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    done = 0

    async def handler(message, envelope):
        nonlocal done
        await asyncio.sleep(0.005)
        done += 1

    subscription = await bob.subscribe(subjects.HEARTBEAT, handler, concurrency=concurrency)
    for _ in range(20):
        await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
    await alice.barrier()
    await asyncio.gather(subscription.stop(), subscription.stop())
    assert done == 20
    await subscription.stop()


async def test_a_handler_may_stop_its_own_subscription(connect: Connect) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    finished = asyncio.Event()

    async def handler(message, envelope):
        await subscription.stop()
        finished.set()

    subscription = await bob.subscribe(subjects.HEARTBEAT, handler)
    await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
    async with asyncio.timeout(PATIENCE_S):
        await finished.wait()
        await subscription.stop()


async def test_a_handler_that_raises_or_is_cancelled_within_does_not_end_its_subscription(
    connect: Connect,
) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    seen = Collector()

    async def handler(message, envelope):
        await seen(message)
        if message.digest == "raise":
            raise RuntimeError("on purpose")
        if message.digest == "cancel":
            raise asyncio.CancelledError  # as awaiting a task that somebody else cancelled does

    await bob.subscribe(subjects.HEARTBEAT, handler)
    for digest in ("raise", "cancel", "fine"):
        await alice.publish(subjects.HEARTBEAT, heartbeat(digest), sid="a")
    await seen.until(3)
    assert bob.counters.handler_errors == 2


async def test_a_full_queue_drops_the_newest_and_counts_them(connect: Connect) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    release = asyncio.Event()
    seen: list[str] = []

    async def handler(message, envelope):
        await release.wait()
        seen.append(message.digest)

    subscription = await bob.subscribe(subjects.HEARTBEAT, handler, pending_limit=10)
    for number in range(100):
        await alice.publish(subjects.HEARTBEAT, heartbeat(str(number)), sid="a")
    await alice.barrier()
    await bob.barrier()
    release.set()
    await subscription.stop()
    assert len(seen) + subscription.dropped == 100
    assert subscription.dropped == bob.counters.dropped >= 89
    assert seen == sorted(seen, key=int)  # holes, but in order


async def test_queue_group_members_share_the_work(connect: Connect) -> None:
    asker = await connect("asker")
    counts = [0, 0]

    def member(index: int):
        async def handler(message, envelope):
            counts[index] += 1
            return Ack()

        return handler

    for index in range(2):
        service = await connect(f"service{index}")
        await service.serve(subjects.STATE_CHANGE, member(index), queue_group="g", sid="group")
    for _ in range(40):
        await asker.request(subjects.STATE_CHANGE, state_change(), sid="group")
    assert sum(counts) == 40
    assert all(counts)


async def test_what_is_too_large_is_refused_where_it_is_made(connect: Connect) -> None:
    alice = await connect("alice")
    with pytest.raises(BadMessage, match="object store"):
        await alice.publish(subjects.HEARTBEAT, heartbeat("x" * (10 << 20)), sid="a")
    assert alice.connected


async def test_a_tap_token_must_be_one_token(connect: Connect) -> None:
    alice = await connect("alice")
    with pytest.raises(BadMessage, match="one token"):
        await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a.b")
