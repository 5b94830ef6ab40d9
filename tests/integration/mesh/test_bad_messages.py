"""What arrives on the bus of a running mesh and makes no sense: counted, kept, told once; everyone goes on.

Which subjects there are comes from the table of subjects, with every name that is in the mesh at that
moment in the place of its tokens: so each entity and each instance of a running job gets its share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import nats
from nats.aio.client import Client as RawClient
from nats.errors import NoRespondersError

from bus import subjects
from bus.connection import Bus
from bus.guard.permissions import of_role
from bus.subject_row import ROOT, Delivery, Subject
from bus.subjects import SUBJECTS, lookup
from bus.wire import codec
from schemas.envelope import EntityKind, Envelope
from schemas.registry import ServiceRecord
from schemas.signals import Role
from schemas.telemetry import DeadLetter, LogLine
from tests.bad_messages import bad_messages
from tests.integration.mesh.conftest import Mesh, done
from tests.integration.mesh.user_jobs import held_job, hold, words
from tests.patience import PATIENCE_S
from tests.raw_requests import raw_request
from tests.waiting import eventually

KINDS = ("truncated", "unknown type", "wrong major", "noise")
REASONS = {"malformed", "unknown type", "wrong version"}
UNHEARD = {
    "node sample",
    "policy decision",
    "fault verdict",
    "fault record",
    "policy switch",
    "log",
    "dead letter",
    "step decision",
    "module record",
    "cordon",
    "leadership",
    "queue capacity",
    "machine demand",
    "machine pool",
    "observation",
    "job topology",
    "link secret",
    "kept answer",
    "module standing",
    "secret",
    "dataset owner",
    "uploads",
    "feed",
    "feed segment",
    "feed piece",
    "blocks kept",
    "build event",
    "unit commit",
    "learnt state",
    "fault question",
    "module drift",
    "generation",
    "stored file",
    "batch",
    "batch unit",
    "service salt",
    "model service",
    "rows needed",
    "wave tokens",
    "consent",
    "kept collection",
    "kept item",
    "pseudonym key",
    "account slice",
    "account position",
}
"""For people, functional modules and data instances that stream from a store, none of which are here; and
keys that are read, not watched."""
ROWS = [row for row in SUBJECTS if of_role(Role.ADMIN, "_INBOX").may_publish(row.wildcard())]
"""What an administrator may send: all but the authorizer's own records."""
ELSEWHERE = {
    *(subjects.BLOCK_SEND, subjects.BIND_SESSION, subjects.END_SESSION, subjects.PREDICT),
    *(subjects.MACHINES_QUERY, subjects.ORDER_MACHINES, subjects.RELEASE_MACHINE, subjects.RESET_POOL),
}
"""Requests that nobody serves here: data instances do that stream from a store, instances that serve, and
provisioners."""
MODULES = {EntityKind.FUNCTIONAL_MODULE}
TEN_MEBIBYTES = 10 << 20
STEPS = 12
"""Of 2 s each, as long as the job is held."""


@dataclass
class Storm:
    """Unusable messages for everyone, and what became of them."""

    bus: Bus
    raw: RawClient
    services: list[ServiceRecord]
    job: str
    letters: list[DeadLetter] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    published: set[str] = field(default_factory=set)

    async def take(self, letter: DeadLetter, envelope: Envelope) -> None:
        self.letters.append(letter)

    def concrete(self, row: Subject) -> list[str]:
        """The row's subjects, for all that are there to hear them; keys that nothing depends on."""
        alive = [service for service in self.services if service.kind in row.receivers | row.senders]
        ours = "intruder" if row.bucket and row is not subjects.ROUTE_TABLE else self.job
        known = {
            "job": [ours],
            "agent": [service.sid for service in self.services if service.kind is EntityKind.CLUSTER],
            "gateway": [service.sid for service in self.services if service.kind is EntityKind.GATEWAY],
            "cluster": ["a", "b"],
            "sid": ["intruder"] if row.bucket else [service.sid for service in alive],
        }
        choices = [known.get(token, ["7"]) for token in row.tokens]
        return [row(**dict(zip(row.tokens, names, strict=True))) for names in itertools.product(*choices)]

    async def send(self, row: Subject) -> None:
        messages = bad_messages(row)
        for subject in self.concrete(row):
            for kind in KINDS:
                if row.delivery is Delivery.REQUEST:
                    await self.ask(subject, messages[kind])
                else:
                    await self.raw.publish(subject, messages[kind])
                    self.published.add(subject)

    async def ask(self, subject: str, data: bytes) -> None:
        """Whoever is there answers in one line that it can't read that."""
        try:
            reply = await raw_request(self.raw, subject, data, timeout_s=PATIENCE_S)
        except NoRespondersError:
            return
        answer, _ = codec.decode(reply.data)
        assert (answer.wire_type, getattr(answer, "code", "")) == ("error", "bad_message"), subject
        assert "\n" not in getattr(answer, "text", "")
        self.answered[subject] += 1

    def heard(self) -> set[str]:
        """Rows of which somebody has buried something."""
        return {row.name for letter in self.letters if (row := self.row_of(letter)) is not None}

    @staticmethod
    def row_name(subject: str) -> str:
        found = lookup(subject)
        return found[0].name if found else subject

    @staticmethod
    def row_of(letter: DeadLetter) -> Subject | None:
        found = lookup(letter.subject)
        return found[0] if found else None

    def of(self, subject: str) -> list[DeadLetter]:
        return [letter for letter in self.letters if letter.subject == subject]


async def until_none(missing: Callable[[], object]) -> None:
    """Polls what other processes do, until nothing of it is missing."""
    await eventually(lambda: not missing(), lambda: missing())


async def too_large(mesh: Mesh, subject: str) -> str:
    """What the server says to whoever announces 10 MiB on a subject."""
    where = urlsplit(mesh.servers[0])
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        options = {"verbose": False, "auth_token": mesh.token, "lang": "none", "version": "0"}
        writer.write(f"CONNECT {json.dumps(options)}\r\nPUB {subject} {TEN_MEBIBYTES}\r\n".encode())
        writer.write(bytes(65_536))
        async with asyncio.timeout(PATIENCE_S):
            while line := await reader.readline():
                if line.startswith(b"-ERR"):
                    return line.decode().strip()
        return "closed without a word"
    except ConnectionError:
        return "closed without a word"
    finally:
        writer.close()


async def test_nonsense_on_every_subject_is_counted_and_disturbs_nobody(mesh: Mesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    parallel = {"stages": 2, "replicas": 2, "segmentation": "uniform"}
    spec = held_job(words(tmp_path), gate, training={"steps": STEPS}, parallel=parallel)
    job = await asyncio.to_thread(hold, mesh.client, spec, gate)
    before = (await asyncio.to_thread(mesh.client.mesh)).services
    async with mesh.bus("witness", token=mesh.token) as bus:
        raw = await nats.connect(mesh.servers[0], token=mesh.token, max_reconnect_attempts=0)
        try:
            storm = Storm(bus, raw, list(before), job)
            await bus.subscribe(subjects.DEAD_LETTER, storm.take)
            following = asyncio.create_task(asyncio.to_thread(done, mesh.client, job))
            await check_storm(storm, mesh)
            assert not following.done(), "the job did not have to bear all of it"
            gate.unlink()
            record = await following
            assert record.recoveries == 0
            await check_kept_and_told_once(storm)
        finally:
            for row in ROWS:
                if row.bucket:
                    for subject in storm.concrete(row):
                        found = lookup(subject)
                        assert found is not None
                        await bus.bucket(row).delete(**found[1])
            await raw.close()
    again = await asyncio.to_thread(mesh.client.submit, spec.model_copy(update={"name": "calm"}))
    calm = await asyncio.to_thread(done, mesh.client, again.job)
    assert calm.weights.sha256 == record.weights.sha256
    after = (await asyncio.to_thread(mesh.client.mesh)).services
    assert lasting(after) == lasting(before), "an entity did not live through it"


async def check_storm(storm: Storm, mesh: Mesh) -> None:
    for row in ROWS:
        await storm.send(row)
    await storm.raw.flush()
    # every request is answered by who serves it, each message of it once, and is a letter
    requests = [row for row in ROWS if row.delivery is Delivery.REQUEST and row.receivers != MODULES]
    served = [row for row in requests if row not in ELSEWHERE]
    silent = {row.name for row in served if not any(map(storm.answered.get, storm.concrete(row)))}
    assert not silent, f"nobody answers: {silent}"
    assert set(storm.answered.values()) == {len(KINDS)}
    await until_none(lambda: [one for one in storm.answered if len(storm.of(one)) < len(KINDS)])
    assert not [one for one in storm.answered if len(storm.of(one)) > len(KINDS)]
    # what was only published is a letter of whoever listens
    others = {row.name for row in ROWS if row.delivery is not Delivery.REQUEST} - UNHEARD
    await until_none(lambda: others - storm.heard())
    assert (storm.heard() & UNHEARD) == set()
    # no entity and no instance was left out, and each says for each message why it can't be used
    for service in storm.services:
        if service.kind is EntityKind.BROKER:
            continue  # two share the questions, and hear nothing else
        mine = {letter.reason.partition(":")[0] for letter in storm.letters if letter.service == service.sid}
        assert mine >= REASONS, f"{service.sid}: {mine}"
    # the largest message that the server takes, once for each; 10 MiB it refuses, on a subject of
    # every row
    largest = b"\xdb" + bytes(codec.MAX_MESSAGE_BYTES - 1)
    served = {storm.of(subject)[0].service: subject for subject in storm.answered}
    for subject in served.values():
        await storm.ask(subject, largest)
        assert storm.answered[subject] == len(KINDS) + 1, subject
    one_each = {storm.row_name(subject): subject for subject in (*storm.answered, *storm.published)}
    for subject in one_each.values():
        assert "Maximum Payload Violation" in await too_large(mesh, subject), subject
    assert not of_role(Role.ADMIN, "_INBOX").may_publish(f"{ROOT}.no.such.subject"), (
        "not even an administrator"
    )


async def check_kept_and_told_once(storm: Storm) -> None:
    """On the stream of dead letters, and in one line of the log for each service, row and reason."""
    kept: Counter[str] = Counter()
    async for item in storm.bus.history(subjects.DEAD_LETTER):
        if isinstance(item.message, DeadLetter):
            kept[item.message.subject] += 1
    for subject, count in storm.answered.items():
        assert kept[subject] >= count, subject
    expected = {
        (letter.service, row.name, letter.reason.partition(":")[0])
        for letter in storm.letters
        if (row := storm.row_of(letter)) is not None and letter.service != storm.bus.sender.name
    }
    told = await told_lines(storm.bus)
    for _ in range(100):  # lines are shipped a moment after they are said
        if expected <= set(told):
            break
        await asyncio.sleep(0.2)
        told = await told_lines(storm.bus)
    assert expected <= set(told), expected - set(told)
    assert set(told.values()) == {1}, [key for key, count in told.items() if count > 1]


async def told_lines(bus: Bus) -> Counter[tuple[str, str, str]]:
    """How often the log has (service, row, reason)."""
    told: Counter[tuple[str, str, str]] = Counter()
    async for item in bus.history(subjects.LOG):
        line = item.message
        if isinstance(line, LogLine) and line.event == "unusable message":
            told[line.fields["service"], line.fields["row"], line.fields["reason"]] += 1
    return told


def lasting(services: tuple[ServiceRecord, ...]) -> set[tuple[str, str, str]]:
    return {
        (service.sid, service.incarnation, service.state)
        for service in services
        if service.kind is not EntityKind.INSTANCE
    }
