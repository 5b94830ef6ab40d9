"""Headers that a server obeys: none lets a sender reach what it may not publish to, or swallow others."""

from __future__ import annotations

import pytest
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import Bus
from bus.messaging.streams import stream_configs
from bus.security.credentials import delegate, issue
from bus.security.identity import Identity
from bus.subject_row import Delivery
from bus.subjects import SUBJECTS
from schemas.envelope import EntityKind as K
from tests.integration.guard.conftest import Guarded
from tests.integration.guard.raw_connection import RawConnection, raw_connection
from tests.recorded import subject_counts, until_recorded

AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
RECORDED = tuple(row for row in SUBJECTS if row.delivery is Delivery.CORE and row.stream)
HEADERS = (
    *({"Nats-Rollup": "all"}, {"Nats-Rollup": "sub"}, {"Nats-TTL": "1"}, {"Nats-TTL": "never"}),
    *({"Nats-Incr": "+1"}, {"Nats-Batch-Id": "x", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"}),
    *({"Nats-Expected-Last-Sequence": "0"}, {"Nats-Expected-Last-Subject-Sequence": "0"}),
    *({"Nats-Expected-Stream": "AUDIT"}, {"Nats-Expected-Last-Msg-Id": "x"}, {"Nats-Msg-Id": "an-id"}),
    *({"Nats-Marker-Reason": "Purge"}, {"KV-Operation": "PURGE", "Nats-Rollup": "all"}),
    *({"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "dmsc.v1.job.command.cancel"},),
)


def instance(sid: str) -> Identity:
    return Identity(name=sid, kind=K.INSTANCE, cluster="a", node="n", job="j")


def hpub(connection: RawConnection, subject: str, headers: dict[str, str], payload: bytes = b"x") -> None:
    head = b"NATS/1.0\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in headers.items()) + b"\r\n"
    line = f"HPUB {subject} {len(head)} {len(head) + len(payload)}\r\n".encode()
    connection.writer.write(line + head + payload + b"\r\n")


async def kept(bus: Bus) -> dict[str, dict[str, int]]:
    """How many messages of each subject each stream has."""
    return {str(config["name"]): await subject_counts(bus, config["name"]) for config in stream_configs(1)}


@pytest.mark.parametrize("headers", HEADERS, ids=lambda headers: "+".join(headers))
async def test_what_others_have_recorded_stays(mesh: Guarded, headers: dict[str, str]) -> None:
    """A recording stream obeys the headers of whoever may publish a row: of its own message alone."""
    one, two = instance("j-s0-r0"), instance("j-s1-r0")
    agent = issue(mesh.root, AGENT)
    async with (
        Bus.connect(mesh.url, name="orchestrator", kind=K.ORCHESTRATOR, token=mesh.root) as smo,
        raw_connection(mesh.url, delegate(agent, one) or "", headers=True) as attacker,
        raw_connection(mesh.url, delegate(agent, two) or "") as victim,
    ):
        theirs = subjects.STEP_CLAIM(job="j", sid=two.name)
        for number in range(3):
            victim.writer.write(f"PUB {theirs} 1\r\n{number}\r\n".encode())
        await until_recorded(smo, subjects.STEP_CLAIM, 3, job="j", sid=two.name)
        before = await kept(smo)
        own = subjects.STEP_CLAIM(job="j", sid=one.name)
        for row in RECORDED:
            if K.INSTANCE in row.senders:
                tokens = {"job": "j", "sid": one.name, "cluster": "a", "agent": "a-n"}
                hpub(attacker, row(**{token: tokens[token] for token in row.tokens}), headers)
        await attacker.until_pong()
        victim.writer.write(f"PUB {theirs} 1\r\n3\r\n".encode())  # and what comes after it is recorded
        await until_recorded(smo, subjects.STEP_CLAIM, 4, job="j", sid=two.name)
        after = await kept(smo)
        assert after["STEPS"][theirs] == 4
        assert set(after["STEPS"]) <= {theirs, own, subjects.NOTICE(job="j", sid=one.name)}
        for stream, counts in before.items():
            if stream not in ("STEPS", "TELEMETRY", "LOGS", "DEAD_LETTERS", "FAULTS", "GENERATIONS"):
                assert after[stream] == counts, stream


async def test_the_same_message_id_of_another_swallows_nothing(mesh: Guarded) -> None:
    """Ids are known for a moment only, and what we record has none."""
    for config in subjects_of_recorders():
        assert config["duplicate_window"] <= 100_000_000, config["name"]
        assert not config.get("allow_rollup_hdrs"), config["name"]
        assert not config.get("allow_msg_ttl"), config["name"]
        assert not config.get("allow_msg_counter"), config["name"]
        assert not config.get("allow_atomic"), config["name"]
        assert not config.get("allow_msg_schedules"), config["name"]


def subjects_of_recorders() -> list[dict[str, object]]:
    return [config for config in stream_configs(1) if config.get("no_ack")]


async def test_a_trace_goes_nowhere_where_its_sender_may_not_publish(mesh: Guarded) -> None:
    who = instance("j-s0-r0")
    async with (
        Bus.connect(mesh.url, name="tap", kind=K.TAP, token=mesh.root) as tap,
        Bus.connect(mesh.url, name="orchestrator", kind=K.ORCHESTRATOR, token=mesh.root) as smo,
        raw_connection(mesh.url, delegate(issue(mesh.root, AGENT), who) or "", headers=True) as attacker,
    ):
        heard: set[str] = set()

        async def arrived(message: Msg) -> None:
            heard.add(message.subject)

        await tap.connection.subscribe(">", arrived)
        before = await kept(smo)
        own = subjects.HEARTBEAT(sid=who.name)
        targets = (
            *("$KV.users.me", "$KV.steps.j", subjects.CANCEL(), subjects.AUDIT(authorizer="authorizer")),
            *("_INBOX.gateway.gateway-a.0123456789abcdef.service-registry._.0", "$JS.API.STREAM.DELETE.LOGS"),
            *("$SYS.REQ.SERVER.PING", "$SRV.PING", "$O.artifacts.X.x"),
        )
        for target in targets:
            for only in ("", "true"):
                hpub(attacker, own, {"Nats-Trace-Dest": target} | ({"Nats-Trace-Only": only} if only else {}))
        await attacker.until_pong()
        await tap.barrier()
        reached = heard & set(targets)
        assert reached == set()
        after = await kept(smo)
        assert {name: after[name] for name in before} == before


async def test_nobody_lists_or_pings_others_services_or_the_server(mesh: Guarded) -> None:
    async with raw_connection(
        mesh.url, delegate(issue(mesh.root, AGENT), instance("j-s0-r0")) or ""
    ) as attacker:
        wrong = {"$SRV.PING", "$SRV.INFO.x", "$SYS.REQ.SERVER.PING", "$SYS.ACCOUNT.DMSC.CONNECT", "$JS.ACK.x"}
        assert await attacker.denied(publish=wrong) == wrong
        assert await attacker.denied(subscribe=wrong | {"$SRV.>", "$SYS.>"}) == wrong | {"$SRV.>", "$SYS.>"}
