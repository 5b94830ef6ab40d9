"""A reply subject is no way to write: whoever asks JetStream, a service or a broker names one freely.

Everybody below the control plane tries, with the server's plain protocol, to have an answer written where it
may not write itself. What counts is the effect: all streams, buckets and objects are as they were.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging import streams
from bus.nats import jetstream
from bus.security.credentials import delegate, issue
from bus.security.identity import Identity
from bus.wire import codec
from schemas.audit import AuditRecord
from schemas.envelope import EntityKind as K
from schemas.envelope import Sender
from schemas.errors import Ack, NotFound
from schemas.names import MESH
from schemas.registry import Heartbeat, InstanceState
from schemas.signals import Role
from tests.builders.jobs import job
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.raw_connection import RawConnection, raw_connection

AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
INSTANCE = Identity(name="j-s0-r0", kind=K.INSTANCE, job="j", cluster="a", node="n")
ATTACKERS: dict[str, Identity | Role] = {
    **{str(role): role for role in Role},
    "instance": INSTANCE,
    "agent": AGENT,
    "module": Identity(name="mine", kind=K.FUNCTIONAL_MODULE, module="mine"),
    "client": Identity(name="tool", kind=K.CLIENT),
}
WEAPONS = (
    "$JS.API.STREAM.DELETE.AUDIT",
    "$JS.API.STREAM.DELETE.OBJ_artifacts",
    "$JS.API.STREAM.DELETE.KV_jobs",
    "$JS.API.STREAM.PURGE.LOGS",
    "$JS.API.STREAM.PURGE.KV_jobs",
    "$JS.API.STREAM.UPDATE.KV_jobs",
    "$KV.users.eve",
    "$KV.jobs.j",
    "$KV.steps.j",
    "$O.artifacts.M.eA==",
    subjects.AUDIT(authorizer="authorizer"),
    subjects.JOB_EVENT(job="j"),
    subjects.CANCEL(),
)
"""Where an answer would do something."""
OF_NO_ACCOUNT = ("DEAD_LETTERS", "LOGS", "POLICIES", "TELEMETRY", "STEPS", "FAULTS", "SIGNALS")
"""Streams in which attackers may say something in their own name: they only grow."""


def questions(own: str) -> list[tuple[str, bytes]]:
    """What JetStream would answer, to whatever reply: with words of the attacker's own, or its own word."""
    config = {"filter_subject": own, "ack_policy": "none", "deliver_policy": "all", "mem_storage": True}
    found = [(f"$JS.API.DIRECT.GET.{stream}.{own}", b"") for stream in ("LOGS", "POLICIES", "KV_jobs")]
    for stream in ("LOGS", "KV_jobs", "JOBS", "KV_routes"):
        made = {"stream_name": stream, "config": config | {"name": "r1"}}
        found += [
            (f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":1}'),
            (f"$JS.API.STREAM.INFO.{stream}", b""),
            (f"$JS.API.CONSUMER.CREATE.{stream}.r1.{own}", json.dumps(made).encode()),
            (f"$JS.API.CONSUMER.MSG.NEXT.{stream}.of-another", b'{"batch":1,"no_wait":true}'),
            (f"$JS.API.CONSUMER.DELETE.{stream}.of-another", b""),
        ]
    acknowledged = ("$KV.jobs.j", "$KV.rendezvous.eA.eA", "$O.artifacts.C.x", subjects.JOB_EVENT(job="j"))
    return found + [(subject, b"{}") for subject in acknowledged]


def delivered(own: str, victim: str) -> list[tuple[str, bytes]]:
    """Consumers that deliver by themselves, as their bodies say."""
    found = []
    for stream, filtered in (("LOGS", own), ("KV_jobs", "$KV.jobs.j"), ("JOBS", ">")):
        config: dict[str, Any] = {"name": "p1", "filter_subject": filtered, "deliver_subject": victim}
        config |= {"ack_policy": "none", "deliver_policy": "all", "mem_storage": True}
        body = json.dumps({"stream_name": stream, "config": config}).encode()
        found.append((f"$JS.API.CONSUMER.CREATE.{stream}.p1.{filtered}", body))
    return found


def token_of(mesh: Guarded, who: Identity | Role) -> str:
    if isinstance(who, Role):
        return TOKENS[who]
    if who.kind is K.INSTANCE:
        return delegate(issue(mesh.root, AGENT), who) or ""
    return issue(mesh.root, who)


@asynccontextmanager
async def connected(mesh: Guarded, who: Identity | Role) -> AsyncIterator[RawConnection]:
    name, kind = ("mine", K.CLIENT) if isinstance(who, Role) else (who.name, who.kind)
    async with raw_connection(mesh.url, token_of(mesh, who), name, kind) as connection:
        yield connection


def say(connection: RawConnection, subject: str, body: bytes, reply: str = "") -> None:
    connection.writer.write(f"PUB {subject} {reply} {len(body)}\r\n".encode() + body + b"\r\n")


@asynccontextmanager
async def owner(mesh: Guarded, kind: K = K.ORCHESTRATOR) -> AsyncIterator[Bus]:
    async with Bus.connect(mesh.url, name=str(kind), kind=kind, token=mesh.root) as bus:
        yield bus


async def state(bus: Bus) -> dict[str, Any]:
    """What each stream holds, and its configuration."""
    found = {}
    for config in streams.stream_configs(1):
        name = config["name"]
        try:
            info = await jetstream.call(bus.connection, f"STREAM.INFO.{name}")
        except NotFound:
            found[name] = "deleted"
            continue
        keys = ("messages", "bytes", "first_seq", "last_seq", "num_deleted")
        held = {key: info["state"].get(key) for key in keys}
        if name in OF_NO_ACCOUNT:
            held = {"first_seq": max(1, held["first_seq"])}  # 0 while it is empty
        found[name] = (held, info["config"])
    return found


async def furnish(mesh: Guarded) -> None:
    """A message in each kind of store, and in each attacker's own name."""
    async with owner(mesh) as bus, owner(mesh, K.AUTHORIZER) as authorizer, owner(mesh, K.GATEWAY) as gateway:
        await bus.bucket(subjects.JOB_RECORD).put(job("j"), job="j")
        await gateway.objects.put("artifacts/k/weights/model", b"of another job" * 100)
        record = AuditRecord.model_construct(
            number=1, at=1.0, kind="act", authorizer="authorizer", previous="", hash=""
        )
        await authorizer.connection.ask(
            subjects.AUDIT(authorizer="authorizer"),
            codec.encode(record, authorizer.sender_map, "1"),
            timeout_s=5,
        )
        await bus.publish(
            subjects.HEARTBEAT,
            Heartbeat(sid="orchestrator", incarnation="x", state=InstanceState.ACTIVE, digest="0"),
            sid="orchestrator",
        )
        await bus.barrier()


@pytest.mark.parametrize("name", ATTACKERS)
async def test_no_answer_lands_where_the_asker_may_not_write(mesh: Guarded, name: str) -> None:
    who = ATTACKERS[name]
    sid = "mine" if isinstance(who, Role) else who.name
    own = (
        subjects.SUGGESTION(owner=MESH, module=sid)
        if name in ("module", "researcher", "admin")
        else subjects.LOG(sid=sid)
    )
    await furnish(mesh)
    async with owner(mesh) as bus:
        async with connected(mesh, who) as connection:
            # the ammunition: words of one's own that a stream records
            sender = codec.sender_map(Sender(name=sid, kind=K.CLIENT, incarnation="x"))
            say(connection, own, codec.encode(Ack(), sender, "1"))
            await connection.until_pong()
            before = await state(bus)
            for victim in WEAPONS:
                for subject, body in (*questions(own), *delivered(own, victim)):
                    say(connection, subject, body, victim)
                # who may answer what it hears could ask itself
                say(connection, f"{own}", b"x", victim)
                say(connection, victim, b"x")
            await connection.until_pong()
        assert await state(bus) == before


async def test_nobody_takes_from_a_consumer_of_somebody_else(mesh: Guarded) -> None:
    """Who knows its name could take, end, and so silence what another follows."""
    await furnish(mesh)
    async with owner(mesh) as bus:
        config = {"name": "of-another", "filter_subject": "$KV.jobs.>", "ack_policy": "none"}
        config |= {"deliver_policy": "all", "mem_storage": True, "inactive_threshold": 60_000_000_000}
        made = {"stream_name": "KV_jobs", "config": config}
        await bus.connection.ask(
            "$JS.API.CONSUMER.CREATE.KV_jobs.of-another.$KV.jobs.>", json.dumps(made).encode(), timeout_s=5
        )
        for name, who in ATTACKERS.items():
            async with connected(mesh, who) as connection:
                calls = ("MSG.NEXT", "DELETE")
                wanted = {f"$JS.API.CONSUMER.{call}.KV_jobs.of-another" for call in calls}
                assert await connection.denied(publish=wanted) == wanted, name
