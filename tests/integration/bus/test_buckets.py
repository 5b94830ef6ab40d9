"""Key-value: compare-and-set, and expiry done right (DESIGN §3)."""

from __future__ import annotations

import asyncio
import base64
import re

import msgpack
import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Writing, whole_seconds
from bus.nats import jetstream
from bus.subject_row import Subject
from bus.wire import codec
from schemas.cluster import Cordon
from schemas.envelope import EntityKind
from schemas.errors import Conflict, NewerRecord, NotFound, Unavailable, UnreadableRecord
from tests.conftest import Connect
from tests.integration.bus.records import Collector, service_record
from tests.patience import PATIENCE_S

ROW = subjects.REGISTRY_RECORD


def test_times_to_live_are_whole_seconds_and_at_least_one() -> None:
    assert [whole_seconds(ttl) for ttl in (0.0, 0.2, 1.0, 1.01, 59.5)] == [1, 1, 1, 2, 60]


async def test_put_get_update_create_delete(connect: Connect) -> None:
    bucket = (await connect("a")).bucket(ROW)
    assert await bucket.get(sid="k1") is None
    assert await bucket.get(leader=True, sid="k1") is None
    first = await bucket.create(service_record("k1"), sid="k1")
    with pytest.raises(Conflict, match="exists already"):
        await bucket.create(service_record("k1"), sid="k1")
    second = await bucket.update(service_record("k1", version="2"), revision=first, sid="k1")
    with pytest.raises(Conflict, match="moved on"):
        await bucket.update(service_record("k1", version="3"), revision=first, sid="k1")
    for leader in (False, True):
        entry = await bucket.get(leader=leader, sid="k1")
        assert (entry.key, entry.revision, entry.message.version) == ("k1", second, "2")
        assert entry.envelope.sender.name == "a"
    with pytest.raises(Conflict):
        await bucket.delete(revision=first, sid="k1")
    assert (await bucket.get(leader=True, sid="k1")).revision == second
    await bucket.delete(revision=second, sid="k1")
    assert await bucket.get(sid="k1") is None
    assert await bucket.get(leader=True, sid="k1") is None
    third = await bucket.create(service_record("k1"), sid="k1")
    assert third > second
    await bucket.delete(sid="k1")


async def test_many_are_written_at_once_each_by_compare_and_set(connect: Connect) -> None:
    bucket = (await connect("a")).bucket(ROW)
    keys = [f"many{number}" for number in range(1_500)]

    def writings(revisions: list[int], version: str) -> list[Writing]:
        return [
            Writing({"sid": key}, service_record(key, version=version), revision)
            for key, revision in zip(keys, revisions, strict=True)
        ]

    first = await bucket.write_many(writings([0] * len(keys), "1"))
    assert first == sorted(first)
    entry = await bucket.get(leader=True, sid="many1234")
    assert entry is not None
    assert (entry.revision, entry.message.version) == (first[1234], "1")
    moved = await bucket.put(service_record("many7", version="moved"), sid="many7")
    second = await bucket.write_many(writings(first, "2"))
    (refused,) = [outcome for outcome in second if not isinstance(outcome, int)]
    assert second.index(refused) == 7
    assert isinstance(refused, Conflict)
    assert await bucket.revision(sid="many7") == moved
    assert await bucket.revision(sid="nobody") == 0
    third = [moved if place == 7 else revision for place, revision in enumerate(second)]
    gone = [Writing({"sid": key}, None, revision) for key, revision in zip(keys, third, strict=True)]
    assert all(isinstance(outcome, int) for outcome in await bucket.write_many(gone))
    assert await bucket.keys() == []


async def test_of_many_creators_and_updaters_one_wins(connect: Connect) -> None:
    buses = [await connect(f"w{index}") for index in range(4)]
    for bus in buses:
        await bus.bucket(ROW).delete(sid="race")  # over a marker, which is the harder case

    async def attempt(coroutine):
        try:
            return await coroutine
        except Conflict:
            return None

    created = await asyncio.gather(
        *(attempt(bus.bucket(ROW).create(service_record("race"), sid="race")) for bus in buses * 4)
    )
    winners = [revision for revision in created if revision]
    assert len(winners) == 1
    updated = await asyncio.gather(
        *(
            attempt(bus.bucket(ROW).update(service_record("race"), revision=winners[0], sid="race"))
            for bus in buses * 4
        )
    )
    assert len([revision for revision in updated if revision]) == 1
    await buses[0].bucket(ROW).delete(sid="race")


async def test_keys_and_entries_leave_out_what_is_gone(connect: Connect) -> None:
    bus = await connect("a")
    bucket = bus.bucket(subjects.ROUTE_TABLE)
    assert await bucket.keys() == []
    registry = bus.bucket(ROW)
    for sid in ("e1", "e2", "e3"):
        await registry.put(service_record(sid), sid=sid)
    await registry.delete(sid="e2")
    assert sorted(await registry.keys()) == ["e1", "e3"]
    assert sorted(entry.message.sid for entry in await registry.entries()) == ["e1", "e3"]
    for sid in ("e1", "e3"):
        await registry.delete(sid=sid)
    assert await registry.entries() == []


async def test_more_entries_than_one_batch(connect: Connect) -> None:
    bucket = (await connect("a")).bucket(ROW)
    count = 600
    for start in range(0, count, 100):
        await asyncio.gather(
            *(bucket.put(service_record(f"m{n}"), sid=f"m{n}") for n in range(start, start + 100))
        )
    assert len(await bucket.entries()) == count
    changes = Collector()
    watch = await bucket.watch(changes)
    await changes.until(lambda items: items and items[-1].key == "")
    assert len(changes.items) == count + 1
    await watch.stop()
    for start in range(0, count, 100):
        await asyncio.gather(*(bucket.delete(sid=f"m{n}") for n in range(start, start + 100)))


async def test_after_expiry_get_is_none_create_works_and_the_watcher_knows(connect: Connect) -> None:
    """nats-py: `get()` returns an empty entry, `create()` fails, a watcher without markers is not told."""
    bus = await connect("a")
    bucket = bus.bucket(ROW)
    changes = Collector()
    watch = await bucket.watch(changes, sid="lease")
    await bucket.create(service_record("lease"), ttl_s=0.3, sid="lease")  # becomes 1 s
    with pytest.raises(Conflict):
        await bucket.create(service_record("lease"), ttl_s=1, sid="lease")
    await changes.until(lambda items: items[-1].key == "lease" and items[-1].message is None)
    assert await bucket.get(sid="lease") is None
    assert await bucket.get(leader=True, sid="lease") is None
    assert "lease" not in await bucket.keys()
    again = await bucket.create(service_record("lease", incarnation="i2"), ttl_s=5, sid="lease")
    await changes.until(lambda items: items[-1].revision == again)  # a bucket keeps the newest value alone
    renewed = await bucket.update(
        service_record("lease", incarnation="i2"), revision=again, ttl_s=5, sid="lease"
    )
    assert renewed > again
    await changes.until(lambda items: items[-1].revision == renewed)
    assert [(change.key, change.message is not None) for change in changes.items] == [
        ("", False),
        ("lease", True),
        ("lease", False),
        ("lease", True),
        ("lease", True),
    ]
    await watch.stop()
    await watch.stop()
    await bucket.delete(sid="lease")


async def test_a_renewed_lease_does_not_expire(connect: Connect) -> None:
    bucket = (await connect("a")).bucket(ROW)
    revision = await bucket.create(service_record("r"), ttl_s=1, sid="r")
    for _ in range(6):
        await asyncio.sleep(0.3)  # the passing of time is the point here
        revision = await bucket.update(service_record("r"), revision=revision, ttl_s=1, sid="r")
    assert (await bucket.get(leader=True, sid="r")).revision == revision
    await bucket.delete(sid="r")


async def test_a_watch_gives_initial_values_then_current_then_changes(connect: Connect) -> None:
    alice, bob = await connect("alice"), await connect("bob")
    await alice.bucket(ROW).put(service_record("w1"), sid="w1")
    changes = Collector()
    watch = await bob.bucket(ROW).watch(changes)
    await changes.until(2)
    await alice.bucket(ROW).put(service_record("w2"), sid="w2")
    await alice.bucket(ROW).delete(sid="w1")
    await changes.until(4)
    assert [(change.key, change.message is not None) for change in changes.items] == [
        ("w1", True),
        ("", False),
        ("w2", True),
        ("w1", False),
    ]
    revisions = [change.revision for change in changes.items if change.key]
    assert revisions == sorted(revisions)
    await watch.stop()
    await alice.bucket(ROW).delete(sid="w2")


async def test_a_watch_handler_that_raises_does_not_end_the_watch(connect: Connect) -> None:
    bus = await connect("a")
    seen = Collector()

    async def handler(change):
        await seen(change)
        if change.message is not None:
            raise RuntimeError("on purpose") if change.revision % 2 else asyncio.CancelledError

    watch = await bus.bucket(ROW).watch(handler, sid="h")
    await bus.bucket(ROW).put(service_record("h"), sid="h")
    await seen.until(2)  # a bucket keeps the newest value alone: the first could be gone before it is sent
    await bus.bucket(ROW).put(service_record("h"), sid="h")
    await seen.until(3)
    assert bus.counters.handler_errors == 2
    await watch.stop()
    await bus.bucket(ROW).delete(sid="h")


async def test_an_unusable_value_is_a_dead_letter_and_the_rest_is_read(connect: Connect) -> None:
    bus = await connect("a")
    bucket = bus.bucket(ROW)
    await bus.raw.publish(ROW(sid="bad"), b"rubbish")
    await bucket.put(service_record("good"), sid="good")
    assert [entry.key for entry in await bucket.entries()] == ["good"]
    assert bus.counters.dead_letters == 1
    changes = Collector()
    watch = await bucket.watch(changes)
    await changes.until(2)
    assert [change.key for change in changes.items] == ["good", ""]
    with pytest.raises(UnreadableRecord):
        await bucket.get(sid="bad")
    await watch.stop()
    for sid in ("bad", "good"):
        await bucket.delete(sid=sid)


async def test_for_what_nobody_can_read_stands_what_was_there_before(connect: Connect) -> None:
    """Kept with its bytes by who writes the row, and put back; where nothing was before, the key goes."""
    bus = await connect("smo", EntityKind.ORCHESTRATOR)
    bucket, row = bus.bucket(subjects.CORDON), subjects.CORDON
    cordon = Cordon(agent="a", cluster="c", node="n", slot=None, reason="fan", by="ada", at=1.0)
    await bucket.put(cordon, agent="a", slot="node")
    await jetstream.publish(bus.connection, row(agent="a", slot="node"), b"rub")
    second = await jetstream.publish(bus.connection, row(agent="a", slot="node"), b"rubbish")
    alone = await jetstream.publish(bus.connection, row(agent="a", slot="7"), b"")
    found = await bucket.get(leader=True, agent="a", slot="node")
    assert found is not None
    assert (found.message, found.revision, found.stale) == (cordon, second, True)
    with pytest.raises(Conflict, match="exists already"):
        await bucket.create(cordon, agent="a", slot="node")
    guard = await bucket.guard()
    async with asyncio.timeout(PATIENCE_S):
        while await bucket.revision(agent="a", slot="node") <= second or await bucket.keys() != ["a.node"]:  # noqa: ASYNC110  # buckets tell of values, not of their ends
            await asyncio.sleep(0.01)
    await guard.stop()
    found = await bucket.get(leader=True, agent="a", slot="node")
    assert found is not None
    assert (found.message, found.stale) == (cordon, False)
    kept = [item.message async for item in bus.history(subjects.UNREADABLE)]
    assert {(one.revision, one.data) for one in kept} >= {(second, b"rubbish"), (alone, b"")}
    await bucket.delete(agent="a", slot="node")


async def test_a_newer_version_is_neither_read_nor_overwritten(connect: Connect) -> None:
    bus = await connect("smo", EntityKind.ORCHESTRATOR)
    bucket, subject = bus.bucket(subjects.CORDON), subjects.CORDON(agent="b", slot="1")
    cordon = Cordon(agent="b", cluster="c", node="n", slot=1, reason="fan", by="ada", at=1.0)
    await bucket.put(cordon, agent="b", slot="1")
    entry = await jetstream.last(bus.connection, "KV_cordons", subject, leader=True)
    assert entry is not None
    newer = msgpack.packb({**codec.peek(entry.data), "version": (9, 0)})
    await jetstream.publish(bus.connection, subject, newer)
    guard = await bucket.guard()
    for reading in (bucket.get(agent="b", slot="1"), bucket.entries(strict=True)):
        with pytest.raises(NewerRecord, match=r"cordons\.b\.1 .*9\.0"):
            await reading
    with pytest.raises(NewerRecord):
        await bucket.create(cordon, agent="b", slot="1")
    assert await bucket.entries() == []
    await guard.stop()
    left = await jetstream.last(bus.connection, "KV_cordons", subject, leader=True)
    assert left is not None
    assert left.data == newer
    await bucket.delete(agent="b", slot="1")


async def test_rows_without_a_bucket_and_buckets_without_a_server(connect: Connect) -> None:
    bus = await connect("a")
    with pytest.raises(NotFound):
        bus.bucket(subjects.HEARTBEAT)


async def test_an_unprovisioned_mesh_says_so(own_server) -> None:
    from schemas.envelope import EntityKind

    async with Bus.connect(own_server.url, name="a", kind=EntityKind.CLIENT) as bus:
        bucket = bus.bucket(ROW)
        with pytest.raises(Unavailable, match="provisioned"):
            await bucket.put(service_record("a"), sid="a")
        with pytest.raises((Unavailable, NotFound)):
            await bucket.get(sid="a")
        with pytest.raises(NotFound):
            await bucket.watch(Collector())
        # By many at once, and again, and then it works
        await asyncio.gather(*(bus.provision() for _ in range(8)))
        await bus.provision()
        await bucket.put(service_record("a"), sid="a")


@pytest.mark.parametrize("row", [subjects.USER_RECORD, ROW])
async def test_the_marker_of_a_deleted_key_outlasts_what_it_displaced(connect: Connect, row: Subject) -> None:
    """When it has expired, a server that is killed may have the displaced value again (nats-server 8505)."""
    bus = await connect("deleter")
    tokens = dict.fromkeys(row.tokens, "gone")
    await bus.bucket(row).delete(**tokens)
    answer = await jetstream.call(
        bus.connection, f"STREAM.MSG.GET.KV_{row.bucket}", {"last_by_subj": row(**tokens)}
    )
    headers = base64.b64decode(answer["message"]["hdrs"]).decode()
    assert "KV-Operation: PURGE" in headers
    kept = re.search(r"Nats-TTL: (\d+)", headers)
    assert (kept is None) if row is subjects.USER_RECORD else (kept is not None and int(kept[1]) >= 86_400)
