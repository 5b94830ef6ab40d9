"""What happens to whom when the server goes away, comes back, or refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bus import subjects
from bus.connection import Bus
from bus.nats import jetstream
from bus.nats.dialer import ConnectionTimes
from bus.server.embedded import EmbeddedServer, find_binary
from schemas.envelope import EntityKind
from schemas.errors import Ack, BusUnreachable, NoResponders, NotFound, Refused, Unavailable
from tests.integration.bus.records import (
    Collector,
    followed,
    heartbeat,
    job_event,
    service_record,
    state_change,
)
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually

CLIENT = EntityKind.CLIENT


async def test_requests_in_flight_fail_at_once_on_disconnect(own_server: EmbeddedServer) -> None:
    async with (
        Bus.connect(own_server.url, name="asker", kind=CLIENT) as asker,
        Bus.connect(own_server.url, name="service", kind=CLIENT) as service,
    ):
        await asker.provision()
        began = asyncio.Event()

        async def never(message, envelope):
            began.set()
            await asyncio.Event().wait()

        await service.serve(subjects.STATE_CHANGE, never)
        asked = asyncio.create_task(
            asker.request(subjects.STATE_CHANGE, state_change(), timeout_s=PATIENCE_S, sid="a")
        )
        await began.wait()
        await own_server.kill()
        with pytest.raises(BusUnreachable):
            await asyncio.wait_for(asked, PATIENCE_S)
        with pytest.raises(BusUnreachable, match="is it running"):
            await asker.request(subjects.STATE_CHANGE, state_change(), sid="a")
        with pytest.raises(BusUnreachable):
            await asker.bucket(subjects.REGISTRY_RECORD).get(sid="a")


async def test_a_deadline_in_heard_time_does_not_pass_while_the_server_stands_still(
    own_server: EmbeddedServer,
) -> None:
    async with Bus.connect(own_server.url, name="judge", kind=CLIENT) as judge:
        asked = asyncio.create_task(
            judge.command(
                subjects.STATE_CHANGE,
                state_change(),
                deadline_s=ConnectionTimes.gap_s + 0.5,
                while_heard=True,
                sid="a",
            )
        )
        waited = asyncio.create_task(waits(judge, ConnectionTimes.gap_s + 0.5))
        await asyncio.sleep(0)
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(3 * (ConnectionTimes.gap_s + 0.5))
            assert judge.connected, "it was noticed by other means"
            assert not asked.done()
            assert not waited.done()
            assert judge.pulse.silent_s > ConnectionTimes.gap_s
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        with pytest.raises(NoResponders):
            await asyncio.wait_for(asked, PATIENCE_S)
        with pytest.raises(TimeoutError):
            await waited


async def test_what_is_to_be_kept_is_not_given_up_while_the_server_stands_still(
    own_server: EmbeddedServer,
) -> None:
    async with Bus.connect(own_server.url, name="writer", kind=CLIENT) as writer:
        await writer.provision()
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: psutil.Process(own_server.pid).status() == psutil.STATUS_STOPPED)
            appending = asyncio.create_task(
                writer.append(
                    subjects.JOB_EVENT, job_event("one"), deadline_s=ConnectionTimes.gap_s + 0.5, job="j"
                )
            )
            await asyncio.sleep(4 * (ConnectionTimes.gap_s + 0.5))
            assert not appending.done()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        assert await asyncio.wait_for(appending, PATIENCE_S) == 1


async def waits(judge: Bus, delay_s: float) -> None:
    async with judge.pulse.timeout(delay_s):
        await asyncio.Event().wait()


async def test_what_is_published_during_an_outage_arrives_afterwards(own_server: EmbeddedServer) -> None:
    async with (
        Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice,
        Bus.connect(own_server.url, name="bob", kind=CLIENT) as bob,
    ):
        seen = Collector()
        await bob.subscribe(subjects.HEARTBEAT, seen)
        await own_server.kill()
        await eventually(lambda: not alice.connected and not bob.connected)
        await alice.publish(subjects.HEARTBEAT, heartbeat("kept"), sid="a")
        await own_server.start()
        await eventually(lambda: alice.connected and bob.connected)
        # What was buffered may reach the server before bob's subscription does; what follows may not.
        await alice.publish(subjects.HEARTBEAT, heartbeat("after"), sid="a")
        await seen.until(lambda items: items and items[-1].digest == "after")


async def test_the_outage_buffer_is_bounded(own_server: EmbeddedServer) -> None:
    async with Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice:
        await own_server.kill()
        await eventually(lambda: not alice.connected)
        big = heartbeat("x" * (1 << 20))

        async def flood() -> None:
            for _ in range(40):
                await alice.publish(subjects.HEARTBEAT, big, sid="a")

        with pytest.raises(BusUnreachable, match="wait to be sent"):
            await flood()
        assert alice.raw.pending_data_size < 17 << 20


async def test_close_while_disconnected_with_data_pending(own_server: EmbeddedServer) -> None:
    before = len(asyncio.all_tasks())
    async with Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice:
        seen = Collector()
        await alice.subscribe(subjects.HEARTBEAT, seen)
        await own_server.kill()
        await eventually(lambda: not alice.connected)
        await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
        assert alice.raw.pending_data_size > 0
    await alice.close()  # twice is fine
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    with pytest.raises(BusUnreachable, match="closed"):
        await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a")


async def test_close_delivers_what_was_published_just_before(own_server: EmbeddedServer) -> None:
    async with Bus.connect(own_server.url, name="bob", kind=CLIENT) as bob:
        seen = Collector()
        await bob.subscribe(subjects.HEARTBEAT, seen)
        async with Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice:
            for _ in range(500):
                await alice.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
        await seen.until(500)


async def test_a_watch_sees_changes_within_two_seconds_of_a_restart(own_server: EmbeddedServer) -> None:
    async with (
        Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice,
        Bus.connect(own_server.url, name="bob", kind=CLIENT) as bob,
    ):
        await alice.provision()
        bucket = alice.bucket(subjects.REGISTRY_RECORD)
        await bucket.put(service_record("a"), sid="a")
        await bucket.put(service_record("b"), sid="b")
        changes = Collector()
        await bob.bucket(subjects.REGISTRY_RECORD).watch(changes)
        await changes.until(lambda items: items and items[-1].key == "")
        assert [change.key for change in changes.items] == ["a", "b", ""]
        await own_server.kill()
        await own_server.start()
        await eventually(lambda: alice.connected)
        await bucket.put(service_record("a", version="2"), sid="a")
        await changes.until(lambda items: any(item.message and item.message.version == "2" for item in items))
        await changes.until(lambda items: any(item.key == "" for item in items[3:]))
        # b stayed as it was: not told again
        assert [change.key for change in changes.items[3:]].count("b") == 0


async def test_a_watch_learns_what_went_away_during_an_outage(own_server: EmbeddedServer) -> None:
    async with Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice:
        await alice.provision()
        bucket = alice.bucket(subjects.REGISTRY_RECORD)
        await bucket.put(service_record("a"), sid="a")
        changes = Collector()
        await bucket.watch(changes)
        await changes.until(2)
        # The connection breaks, and when it is back the key is gone without a mark: as after an outage
        # that outlasted the mark.
        await own_server.kill()
        async with (
            EmbeddedServer(own_server.store_dir) as elsewhere,  # where alice does not find it
            Bus.connect(elsewhere.url, name="mallory", kind=CLIENT) as mallory,
        ):
            await jetstream.call(mallory.connection, "STREAM.PURGE.KV_registry")
        await own_server.start()
        await changes.until(lambda items: any(item.key == "a" and item.message is None for item in items))
        assert changes.items[-1].key in ("a", "")


async def test_subscriptions_and_callbacks_come_back_after_a_restart(own_server: EmbeddedServer) -> None:
    async with (
        Bus.connect(own_server.url, name="asker", kind=CLIENT) as asker,
        Bus.connect(own_server.url, name="service", kind=CLIENT) as service,
    ):
        called = asyncio.Event()

        async def callback() -> None:
            called.set()

        async def handler(message, envelope):
            return Ack()

        service.on_reconnect(callback)
        await service.serve(subjects.STATE_CHANGE, handler)
        await own_server.restart()
        await asyncio.wait_for(called.wait(), PATIENCE_S)
        assert await asker.command(subjects.STATE_CHANGE, state_change(), sid="a") == Ack()
        assert service.counters.reconnects == 1


async def test_append_and_followed_history_go_over_a_restart(own_server: EmbeddedServer) -> None:
    async with Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice:
        await alice.provision()
        async with followed(alice, "j1") as texts:
            await alice.append(subjects.JOB_EVENT, job_event("one"), job="j1")
            await eventually(lambda: texts == ["one"])
            await own_server.kill()
            appending = asyncio.create_task(alice.append(subjects.JOB_EVENT, job_event("two"), job="j1"))
            await asyncio.sleep(0.05)
            assert not appending.done()
            await own_server.start()
            assert await asyncio.wait_for(appending, PATIENCE_S) == 2
            await eventually(lambda: texts == ["one", "two"])


async def test_provisioned_memory_is_made_again_after_a_restart(own_server: EmbeddedServer) -> None:
    """Streams in memory are gone with the server; whoever provisioned makes them again."""
    async with Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice:
        await alice.provision()
        await own_server.restart()
        await eventually(lambda: alice.counters.reconnects == 1)

        for _ in range(500):
            try:
                await jetstream.call(alice.connection, "STREAM.INFO.KV_rendezvous")
                break
            except (NotFound, Unavailable):
                await asyncio.sleep(0.01)
        else:
            pytest.fail("the rendezvous did not come back")


async def test_a_server_that_accepts_and_says_nothing_is_dialled_again(own_server: EmbeddedServer) -> None:
    """As one on a stalled machine does; whoever dials has told how patient it is."""
    callers: list[asyncio.StreamWriter] = []

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(writer)
        if len(callers) == 1:
            return
        host, port = own_server.url.removeprefix("nats://").split(":")
        behind, ahead = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)

        await asyncio.gather(pump(reader, ahead), pump(behind, writer), return_exceptions=True)
        ahead.close()

    door = await asyncio.start_server(answered, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{door.sockets[0].getsockname()[1]}"
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            Bus.connect(url, name="a", kind=CLIENT, connect_timeout_s=PATIENCE_S) as bus,
        ):
            assert len(callers) == 2
            await bus.barrier()
    finally:
        door.close()
        for caller in callers:
            caller.close()


async def test_no_server_is_one_clear_line() -> None:
    with pytest.raises(BusUnreachable, match=r"no bus at nats://127\.0\.0\.1:1 .*is it running") as error:
        async with Bus.connect("nats://127.0.0.1:1", name="a", kind=CLIENT, connect_timeout_s=0.5):
            pass
    assert "\n" not in error.value.text


async def test_a_wrong_token_is_refused_at_once_and_never_shown(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, token="right", sync_always=False) as server:
        with pytest.raises(Refused, match="token") as error:
            async with Bus.connect(server.url, name="a", kind=CLIENT, token="wrong-secret"):
                pass
        assert "wrong-secret" not in error.value.text
        async with Bus.connect(server.url, name="a", kind=CLIENT, token="right") as bus:
            await bus.barrier()


async def test_a_credential_that_is_taken_away_surfaces_and_a_new_one_heals(tmp_path: Path) -> None:
    """The server closes such a connection for good; the bus dials again, with the present token."""
    async with EmbeddedServer(tmp_path, token="first", sync_always=False) as server:
        token = ["first"]
        async with Bus.connect(server.url, name="a", kind=CLIENT, token=lambda: token[0]) as bus:
            client = bus.raw
            seen = Collector()
            await bus.subscribe(subjects.HEARTBEAT, seen)
            config = tmp_path / "server.conf"
            config.write_text(config.read_text().replace('"first"', '"second"'))
            os.kill(server.pid, signal.SIGHUP)
            await eventually(lambda: not bus.connected)
            with pytest.raises((Refused, BusUnreachable)):
                await bus.request(subjects.STATE_CHANGE, state_change(), sid="a")
            token[0] = "second"
            await eventually(lambda: bus.connected)
            await bus.publish(subjects.HEARTBEAT, heartbeat("healed"), sid="a")
            await seen.until(1)
            assert client.is_closed or bus.raw is client


NARROW = """
listen: "127.0.0.1:-1"
ports_file_dir: "{folder}"
authorization {{
  default_permissions: {{
    publish: ["dmsc.v1.registry.heartbeat.*", "_INBOX.>"]
    subscribe: ["dmsc.v1.registry.heartbeat.*", "_INBOX.>"]
  }}
  users: [{{user: "u", password: "p"}}]
}}
"""


@pytest.fixture
def narrow_server(tmp_path: Path) -> Iterator[str]:
    """A server whose one user may use heartbeats and inboxes, nothing else."""
    config = tmp_path / "narrow.conf"
    config.write_text(NARROW.format(folder=tmp_path))
    process = subprocess.Popen([str(find_binary()), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not (ports := list(tmp_path.glob("*.ports"))) or not ports[0].read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield json.loads(ports[0].read_text())["nats"][0].replace("nats://", "nats://u:p@")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def test_denied_subscribe_and_request_reach_the_caller(narrow_server: str) -> None:
    """nats-py tells denials only to its error callback: the caller would listen to nothing, or time out."""
    async with Bus.connect(narrow_server, name="Narrow", kind=CLIENT) as bus:
        seen = Collector()
        with pytest.raises(Refused, match="may not listen"):
            await bus.subscribe(subjects.LOG, seen)
        with pytest.raises(Refused, match="may not listen"):
            await bus.subscribe(subjects.LOG, seen, queue_group="g")
        with pytest.raises(Refused, match="may not publish"):
            await bus.request(subjects.STATE_CHANGE, state_change(), timeout_s=PATIENCE_S, sid="A")
        with pytest.raises(Refused, match="may not publish"):
            await bus.command(subjects.STATE_CHANGE, state_change(), deadline_s=PATIENCE_S, sid="A")
        await bus.subscribe(subjects.HEARTBEAT, seen)
        await bus.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
        await seen.until(1)
        assert bus.counters.denied == 4
        assert "p@" not in bus.connection.unreachable().text


async def test_a_hung_publisher_can_be_cancelled(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py's forced flush swallows cancellation; the bus waits in a way that can be cancelled."""
    times = ConnectionTimes(ping_interval_s=int(NEVER_S))  # no missing pong ends the wait
    async with Bus.connect(own_server.url, name="alice", kind=CLIENT, connection_times=times) as alice:
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            published = 0

            async def flood() -> None:
                nonlocal published
                while True:
                    await alice.publish(subjects.HEARTBEAT, heartbeat("x" * 100_000), sid="a")
                    published += 1

            task = asyncio.create_task(flood())
            await eventually(lambda: published > 10)
            before = 0
            while before != published:  # until it waits for the server
                before = published
                await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE_S)
            assert task.cancelled()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)


async def test_publishers_that_waited_for_a_hung_server_go_on_in_their_order(
    own_server: EmbeddedServer,
) -> None:
    """A connection keeps the order of what is sent through it, also where many tasks wait for it to drain."""
    seen = Collector()
    async with (
        Bus.connect(own_server.url, name="alice", kind=CLIENT) as alice,
        Bus.connect(own_server.url, name="bob", kind=CLIENT) as bob,
    ):
        await bob.subscribe(subjects.HEARTBEAT, seen)
        sending: list[asyncio.Task[str]] = []

        def send(count: int) -> None:
            for _ in range(count):
                message = heartbeat(f"{len(sending):04}".ljust(100_000, "."))
                sending.append(asyncio.create_task(alice.publish(subjects.HEARTBEAT, message, sid="a")))

        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            send(200)
            await eventually(lambda: any(task.done() for task in sending))
            assert not all(task.done() for task in sending), "nobody had to wait"
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        while not sending[199].done():  # and newcomers while the others get their turns
            send(1)
            await asyncio.sleep(0)
        await asyncio.gather(*sending)
        await seen.until(len(sending))
        numbers = [int(item.digest[:4]) for item in seen.items]
        assert numbers == list(range(len(sending)))
