"""A broker reads and stores for others: what they may have, to them alone, and whichever broker lives."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.guard.broker_caller import BrokerCaller
from bus.guard.permissions import PRIVATE
from bus.messaging.rendezvous import Rendezvous, links_of
from bus.nats import jetstream
from bus.nats.reply_subjects import inbox_of, inbox_of_token
from bus.recording import run_record
from bus.security.credentials import delegate, issue
from bus.security.identity import Identity
from bus.tap import scope as tap_scope
from bus.tap.decoder import TapDecoder
from bus.tap.history import past
from bus.wire import codec
from entities.broker import Broker, brokering
from policies.kit.instance_store import InstanceStore
from schemas.broker import BrokerRequest
from schemas.envelope import EntityKind as K
from schemas.envelope import Sender
from schemas.errors import BadInput, DmscError, NotFound, RateLimited, Refused
from schemas.gateway_api import TapScope
from schemas.job import JobEvent, JobState
from schemas.signals import Role
from schemas.step import Member
from schemas.store import StoreRows
from tests.builders.jobs import job, spec
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.test_reply_subjects import (
    AGENT,
    ATTACKERS,
    WEAPONS,
    connected,
    delivered,
    furnish,
    owner,
    questions,
    say,
    state,
)
from tests.patience import PATIENCE_S
from tests.waiting import eventually


def instance(job_id: str) -> Identity:
    return Identity(name=f"{job_id}-s0-r0", kind=K.INSTANCE, job=job_id, cluster="a", node="n")


def bus_of(mesh: Guarded, who: Identity) -> Any:
    token = delegate(issue(mesh.root, AGENT), who) if who.kind is K.INSTANCE else issue(mesh.root, who)
    return Bus.connect(mesh.url, name=who.name, kind=who.kind, token=token, connect_timeout_s=PATIENCE_S)


def asking(who: Identity | Role) -> tuple[BrokerCaller, str]:
    """As whom it asks, and an inbox of its own."""
    if isinstance(who, Role):
        inbox = inbox_of_token(TOKENS[who])
        role = Role.OPERATOR if who in (Role.OPERATOR, Role.ADMIN) else Role.VIEWER
        return BrokerCaller("user", str(role), inbox.rpartition(".")[2]), inbox
    return BrokerCaller.of_identity(who), inbox_of(who.kind, who.name)


@pytest.mark.parametrize("name", ATTACKERS)
async def test_a_broker_is_nobodys_hand(mesh: Guarded, name: str) -> None:
    """The same weapons by way of it: foreign replies, bodies that say where to deliver, calls of its own."""
    who = ATTACKERS[name]
    asker, inbox = asking(who)
    mine = f"{inbox}.0123456789abcdef.broker._"
    own = subjects.LOG(sid="mine")
    sender = codec.sender_map(Sender(name="mine", kind=K.CLIENT, incarnation="x"))
    await furnish(mesh)
    async with owner(mesh) as bus:
        before = await state(bus)
        async with connected(mesh, who) as connection:

            def ask(call: str, body: bytes, reply: str, **headers: str) -> None:
                request = BrokerRequest.model_construct(call=call, headers=headers, body=body)
                say(connection, asker.subject, codec.encode(request, sender, "1"), reply)

            for victim in WEAPONS:
                for call, body in (*questions(own), *delivered(own, victim), (victim, b"x")):
                    ask(call, body, victim)
                    ask(call, body, f"{mine}.x")
                ask(victim, b"", f"{mine}.x")
                ask(victim, b"", f"{mine}.x", **{"Nats-Rollup": "all"})
            await connection.until_pong()
            connection.writer.write(f"SUB {inbox}.> 1\r\n".encode())
            for _ in range(
                2
            ):  # each broker takes some, and answers in any order: the barrier is its own test
                ask("$JS.API.nothing", b"", f"{mine}.last")
            async with asyncio.timeout(PATIENCE_S):
                while b"last" not in await connection.reader.readline():
                    pass
        assert await state(bus) == before


async def test_readers_have_what_the_table_gives_them_and_no_more(mesh: Guarded) -> None:
    await furnish(mesh)
    async with bus_of(mesh, instance("j")) as bus:
        entry = await bus.bucket(subjects.JOB_RECORD).get(job="j")
        assert entry is not None
        with pytest.raises(Refused):
            await bus.bucket(subjects.JOB_RECORD).get(job="k")
        with pytest.raises(Refused):
            await bus.bucket(subjects.JOB_RECORD).entries()
        for call in ("STREAM.DELETE.AUDIT", "STREAM.PURGE.KV_jobs", "STREAM.INFO.AUDIT", "INFO"):
            with pytest.raises(DmscError):
                await jetstream.call(bus.connection, call)
        with pytest.raises(DmscError, match="not one that a broker takes"):
            await jetstream.publish(
                bus.connection, "$KV.rendezvous.x.y", b"", {"Nats-Rollup": "all"}, timeout_s=PATIENCE_S
            )
        link = bus.connection.broker
        assert link is not None
        theirs = link.consumer("KV_jobs", "$KV.jobs.j")
    async with bus_of(mesh, instance("k")) as stranger:
        with pytest.raises(Refused):
            await jetstream.call(stranger.connection, f"CONSUMER.DELETE.KV_jobs.{theirs}")
        with pytest.raises(Refused):
            await Rendezvous(stranger, links_of("j")).get("key", timeout_s=PATIENCE_S)
    for role in Role:
        user = Bus.connect(mesh.url, name="tap", kind=K.TAP, token=TOKENS[role], connect_timeout_s=PATIENCE_S)
        async with user as tap:
            assert [one async for one in tap.history(subjects.LOG)] == []
            if role in (Role.VIEWER, Role.RESEARCHER):
                with pytest.raises(Refused):
                    await tap.bucket(subjects.REVOCATION).keys()
            else:
                assert await tap.bucket(subjects.REVOCATION).keys() == []


async def test_each_role_reads_a_run_and_follows_what_came_of_a_message(mesh: Guarded) -> None:
    """Of a run's record nothing is private; of the streams a viewer's tap reads what the role sees."""
    event = JobEvent(job="j", kind="state", at=1.0, state=JobState.DONE)
    async with owner(mesh) as bus:
        await bus.append(subjects.JOB_EVENT, event, job="j")
    hidden = TapScope(user="u", role=Role.VIEWER, everything=False, hidden=tuple(row.name for row in PRIVATE))
    for role in Role:
        user = Bus.connect(
            mesh.url, name="runs", kind=K.CLIENT, token=TOKENS[role], connect_timeout_s=PATIENCE_S
        )
        async with user as reader:
            assert (await run_record.counts(reader)).keys() == {"j"}
            span = await run_record.span_of(reader, "j")
            frames = [frame async for frame in run_record.read_run(reader, "j", span)]
            assert [frame.subject for frame in frames] == [subjects.JOB_EVENT(job="j")]
            lens = TapDecoder(may=tap_scope.may(hidden))
            assert [tapped.subject async for tapped in past(reader, lens)] == [subjects.JOB_EVENT(job="j")]
            assert reader.counters.denied == 0


async def test_an_instance_writes_below_its_job_and_reads_what_its_job_names(mesh: Guarded) -> None:
    data = bytes(range(256)) * 5_000
    async with owner(mesh) as bus:
        for name in ("j", "k"):
            await bus.bucket(subjects.JOB_RECORD).put(job(name), job=name)
        named = "bus://artifacts/j/checkpoints"
        for name, may_read in (
            ("heir", (named,)),
            ("thief", ()),
        ):  # Type 3 let one of their users, and not the other
            record = job(name, may_read=may_read).model_copy(update={"spec": spec(resume_from=named)})
            await bus.bucket(subjects.JOB_RECORD).put(record, job=name)
    async with bus_of(mesh, instance("j")) as mine, bus_of(mesh, instance("k")) as theirs:
        await mine.objects.put("artifacts/j/checkpoints/one", data)
        await mine.objects.put("artifacts/j/checkpoints/one", data)  # replaced: the chunks before are removed
        info = await mine.objects.info("artifacts/j/checkpoints/one")
        for attempt in (
            theirs.objects.put("artifacts/j/checkpoints/one", b"forged"),
            theirs.objects.info("artifacts/j/checkpoints/one"),
            theirs.objects.delete("artifacts/j/checkpoints/one"),
            theirs.objects.put("artifacts/jj/x", b"x"),
            theirs.objects.list("artifacts/"),
            mine.objects.put("datasets/x", b"x"),
            jetstream.call(
                theirs.connection, "STREAM.PURGE.OBJ_artifacts", {"filter": f"$O.artifacts.C.{info.nuid}"}
            ),
            jetstream.call(theirs.connection, "STREAM.PURGE.OBJ_artifacts", {"filter": "$O.artifacts.C.k.*"}),
        ):
            with pytest.raises(DmscError):
                await attempt
        # who describes its own object with another's chunks would have them removed by who replaces it
        meta = {"name": "artifacts/k/x", "bucket": "artifacts", "nuid": info.nuid, "size": 1, "chunks": 1}
        token = base64.urlsafe_b64encode(b"artifacts/k/x").decode()
        with pytest.raises(Refused):
            await jetstream.publish(theirs.connection, f"$O.artifacts.M.{token}", json.dumps(meta).encode())
        assert b"".join([piece async for piece in mine.objects.get("artifacts/j/checkpoints/one")]) == data
    async with bus_of(mesh, instance("heir")) as reader:
        assert b"".join([piece async for piece in reader.objects.get("artifacts/j/checkpoints/one")]) == data
        with pytest.raises(Refused):
            await reader.objects.put("artifacts/j/checkpoints/one", b"forged")
    async with bus_of(mesh, instance("thief")) as reader:
        with pytest.raises(Refused):
            await reader.objects.info("artifacts/j/checkpoints/one")
    async with owner(mesh, K.GATEWAY) as gateway:
        assert (await gateway.objects.info("artifacts/j/checkpoints/one")).digest == info.digest
        assert await gateway.objects.delete("artifacts/j/checkpoints/one")
        with pytest.raises(NotFound):
            await gateway.objects.info("artifacts/j/checkpoints/one")


async def test_a_module_asks_the_stores_of_its_own_jobs(mesh: Guarded) -> None:
    """A user's by way of a broker, one whose credential lists jobs by itself; the mesh's own asks of any."""
    asked: list[tuple[str, str]] = []

    async def answer(message: Any, envelope: Any) -> StoreRows:
        asked.append((message.job, envelope.sender.name))
        if message.columns:
            raise BadInput("there is no such column")
        member = Member(sid=f"{message.job}-s0-r0", incarnation="i")
        return StoreRows(member=member, table="events", columns=("id",), rows=((7,),), schema_version=1)

    users = {
        "mine": "researcher-one",
        "yours": "researcher-one-b",
    }  # who is called as if theirs were a module
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(owner(mesh))
        for name, user in users.items():
            await bus.bucket(subjects.JOB_RECORD).put(job(name, user=user), job=name)
            holder = await stack.enter_async_context(bus_of(mesh, instance(name)))
            await holder.serve(subjects.STORE_QUERY, answer, job=name, sid=f"{name}-s0-r0")

        async def ask(who: Bus, job_id: str, user: str = "", **narrow: Any) -> StoreRows:
            store = InstanceStore(who, job=job_id, sid=f"{job_id}-s0-r0", owner=user, timeout_s=PATIENCE_S)
            return await store.rows("events", **narrow)

        async def module(name: str, token: str) -> Bus:
            made = Bus.connect(
                mesh.url, name=name, kind=K.FUNCTIONAL_MODULE, token=token, connect_timeout_s=PATIENCE_S
            )
            return await stack.enter_async_context(made)

        theirs = await module("researcher-one-b", TOKENS[Role.RESEARCHER])
        assert (await ask(theirs, "mine", "researcher-one")).rows == ((7,),)
        with pytest.raises(BadInput, match="no such column"):
            await ask(theirs, "mine", "researcher-one", columns=("x",))
        with pytest.raises(Refused, match="stores of their own jobs; yours is researcher-one-b's"):
            await ask(theirs, "yours", "researcher-one")
        with pytest.raises(Refused, match="nothing is not there"):
            await ask(theirs, "nothing", "researcher-one")
        for job_id, user in (("yours", "researcher-one-b"), ("mine", ""), ("yours", "")):
            with pytest.raises(Refused, match="may not publish"):
                await ask(theirs, job_id, user)
        bound = Identity(name="bound", kind=K.FUNCTIONAL_MODULE, module="bound", jobs=("mine",))
        narrow = await module("bound", issue(mesh.root, bound))
        assert (await ask(narrow, "mine")).rows == ((7,),)
        with pytest.raises(Refused, match="may not publish"):
            await ask(narrow, "yours")
        any_jobs = Identity(name="meshs", kind=K.FUNCTIONAL_MODULE, module="meshs")
        assert (await ask(await module("meshs", issue(mesh.root, any_jobs)), "yours")).rows == ((7,),)
    assert set(asked) == {("mine", "broker"), ("mine", "bound"), ("yours", "meshs")}


async def test_one_askers_slow_questions_are_nobody_elses_wait(mesh: Guarded) -> None:
    """A user's module asks the silent stores of the user's own job, hundreds at once."""
    reached = asyncio.Event()

    async def never(message: Any, envelope: Any) -> StoreRows:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(owner(mesh))
        await bus.bucket(subjects.JOB_RECORD).put(job("mine", user="researcher-one"), job="mine")
        holder = await stack.enter_async_context(bus_of(mesh, instance("mine")))
        await holder.serve(subjects.STORE_QUERY, never, job="mine", sid="mine-s0-r0")
        bystander = await stack.enter_async_context(bus_of(mesh, instance("j")))
        theirs = await stack.enter_async_context(
            Bus.connect(
                mesh.url,
                name="researcher-one-b",
                kind=K.FUNCTIONAL_MODULE,
                token=TOKENS[Role.RESEARCHER],
                connect_timeout_s=PATIENCE_S,
            )
        )
        store = InstanceStore(
            theirs, job="mine", sid="mine-s0-r0", owner="researcher-one", timeout_s=PATIENCE_S
        )
        flood = [asyncio.create_task(store.rows("events")) for _ in range(300)]
        refused = 0
        async with asyncio.timeout(PATIENCE_S):
            for finished in asyncio.as_completed(flood):
                with pytest.raises(RateLimited, match="too many questions to the stores of mine are open"):
                    await finished
                refused += 1
                if refused == 200:
                    break
            await reached.wait()
            assert await Rendezvous(bystander, links_of("j")).add("count", 1) == 1
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_a_watch_outlives_its_broker(mesh: Guarded) -> None:
    """The fixture's broker, and another: each is ended once while a watch runs; nothing is missed."""
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def changed(change: Any) -> None:
        if change.key:
            seen.put_nowait(change.message.reason)

    async with owner(mesh) as bus, bus_of(mesh, instance("j")) as reader:
        bucket = bus.bucket(subjects.JOB_RECORD)
        first = brokering([mesh.url], mesh.root, "broker-second")
        await first.__aenter__()
        watch = await reader.bucket(subjects.JOB_RECORD).watch(changed, job="j")
        for number in range(6):
            if number == 3:
                await first.__aexit__(None, None, None)
            await bucket.put(job("j", reason=str(number)), job="j")
            async with asyncio.timeout(PATIENCE_S):
                assert await seen.get() == str(number)
            assert await Rendezvous(reader, links_of("j")).add("count", 1) == number + 1
        await watch.stop()


async def test_what_comes_from_elsewhere_is_counted_and_ends_no_broker(mesh: Guarded) -> None:
    identity = K.BROKER
    async with Bus.connect(mesh.url, name="broker-third", kind=identity, token=mesh.root) as bus:
        broker = Broker(bus)
        running = asyncio.create_task(broker.run())
        async with connected(mesh, Role.VIEWER) as connection:
            asker, inbox = asking(Role.VIEWER)
            for body in (b"", b"\xff" * 100, b"{}"):
                for _ in range(20):  # the fixture's takes some
                    say(connection, asker.subject, body, f"{inbox}.x")
            await connection.until_pong()
            await eventually(lambda: bus.counters.dead_letters)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
