"""What is attacked: a guarded server, its streams with something marked in each, our services, and our eyes.

The broker is the real one. The other services are `Bus.serve` of each row's receivers, by their own
credentials; what they decide is left out: each refuses what it is asked, in the form in which it would answer
anything. Clocks stand still: nobody sends heartbeats, so that whatever happens is the attacker's doing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.access_matrix.contents import (
    COUNTED,
    ENDED_JOB,
    GOING_JOBS,
    JOB_RECORDS,
    JOBS,
    content,
    mark,
    places,
    record_of,
)
from benchmarks.access_matrix.parties import TOKENS
from benchmarks.access_matrix.wire import Heard, Said, Wire, wire
from bus import subjects
from bus.connection import Bus
from bus.guard.auth_callout import Caller, ConnectionGrant
from bus.guard.guard_keys import GuardKeys
from bus.guard.permissions import Permissions
from bus.messaging import streams
from bus.security.credentials import issue, new_root
from bus.security.identity import Identity
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Delivery, Names
from bus.subjects import SUBJECTS
from entities.authorizer.access.authentication import User, Users
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer
from entities.authorizer.connections.job_states import JobStates
from entities.broker import Broker
from schemas.base import Message
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope
from schemas.errors import NotFound
from schemas.job import JobState
from schemas.registry import Resolve, Resolved

OBJECTS = f"OBJ_{streams.OBJECT_BUCKET}"
AUDITOR = "who looks on, and mends what an attack broke"
INBOX = "_INBOX.auditor"
"""Of the auditor alone: what is said there is no effect of an attack."""
BROKERS_CONSUMER = re.compile(r"b[0-9a-f]{20}x[0-9a-f]+$")
VICTIM = "victim"
"""A consumer of the control plane's, of each stream: others may not read, confirm or end it."""
ROUNDS_MOST = 200
DIGESTED = 64
"""Messages of each stream, from its first on, whose contents are compared: all that was planted, and more."""
OF_THE_READING = ("Nats-Num-Pending", "Nats-Last-Sequence")
"""Headers that say how far a reading is, and nothing of what is kept."""

ORCHESTRATOR = Identity(name="orchestrator", kind=K.ORCHESTRATOR)
SERVICES = (
    Identity(name="service-registry", kind=K.SERVICE_REGISTRY),
    Identity(name="gateway-b", kind=K.GATEWAY, cluster="b"),
    Identity(name="authorizer", kind=K.AUTHORIZER),
    Identity(name="router-b", kind=K.ROUTER, cluster="b"),
    ORCHESTRATOR,
    Identity(name="b-n", kind=K.CLUSTER, cluster="b", node="n"),
    Identity(name="k-s0-r0", kind=K.INSTANCE, cluster="b", node="n", job="k"),
    Identity(name="another", kind=K.FUNCTIONAL_MODULE, module="another"),
    Identity(name="broker", kind=K.BROKER),
    Identity(name="accountant", kind=K.ACCOUNTANT),
    Identity(name="provisioner", kind=K.PROVISIONER),
    Identity(name="model-registry", kind=K.MODEL_REGISTRY),
)


@dataclass(frozen=True, slots=True)
class Widening:
    """What the guard gives a caller of this name beyond its rights."""

    name: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()


class Guard(ConnectionAuthorizer):
    """The authorizer's own, which also lets the auditor in, and can be spoilt."""

    widening: Widening | None = None

    def decide(self, caller: Caller) -> ConnectionGrant:
        if caller.token == AUDITOR:
            everything = Permissions((">",), (">",))
            return ConnectionGrant("auditor", everything, int(time.time()) + 86_400)
        grant = super().decide(caller)
        extra = self.widening
        if extra is None or caller.name.partition("/")[0] != extra.name:
            return grant
        rights = grant.permissions
        wider = replace(
            rights,
            publish=(*rights.publish, *extra.publish),
            subscribe=(*rights.subscribe, *extra.subscribe),
            never=tuple(one for one in rights.never if one not in extra.publish),
        )
        return replace(grant, permissions=wider)


@dataclass(frozen=True, slots=True)
class StreamPrint:
    """A stream at a moment: whatever is stored, removed or changed shows in it. `contents` are its first
    messages, by sequence: their subjects, and SHA-256 of all that they hold; `created`: it was not made anew.
    """

    config: str
    messages: int
    bytes: int
    first: int
    last: int
    deleted: int
    consumers: int
    created: str = ""
    contents: Mapping[int, tuple[str, str]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, info: dict[str, Any]) -> StreamPrint:
        state = info["state"]
        return cls(
            config=json.dumps(info["config"], sort_keys=True),
            messages=state["messages"],
            bytes=state["bytes"],
            first=state["first_seq"],
            last=state["last_seq"],
            deleted=state.get("num_deleted", 0),
            consumers=state["consumer_count"],
            created=info.get("created", ""),
        )

    def differences(self, other: StreamPrint) -> str:
        """From this to the other, in words."""
        if self.config != other.config:
            return "its configuration was changed"
        if self.created != other.created:
            return "it was removed and made anew"
        found = []
        for name in ("messages", "first", "last", "deleted", "consumers"):
            before, after = getattr(self, name), getattr(other, name)
            if before != after:
                found.append(f"{name} {before} → {after}")
        return ", ".join(found)

    def lost(self, other: StreamPrint) -> list[str]:
        """Subjects of those first messages which the other does not hold any more, or not to the byte."""
        return sorted(
            {kept[0] for number, kept in self.contents.items() if other.contents.get(number) != kept}
        )


Print = dict[str, StreamPrint]
"""By stream; and by `stream/consumer` how far each of the victim's is (in `StreamPrint.config`)."""


@dataclass
class World:
    """See the module."""

    url: str
    root: str
    guards: list[Guard]
    auditor: Wire
    tap: Wire
    services: list[Bus]
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    planted: dict[str, list[Said]] = field(default_factory=dict)
    numbers: int = 0

    def widen(self, widening: Widening | None) -> None:
        for guard in self.guards:
            guard.widening = widening

    # --- looking -------------------------------------------------------------------------------------------

    async def settle(self, attacker: Wire) -> None:
        """All that follows from what the attacker has said has happened, and was heard by the tap."""
        await attacker.flush()
        before, quiet = -1, 0
        for _ in range(ROUNDS_MOST):
            await asyncio.gather(*(bus.raw.flush() for bus in self.services))
            await asyncio.sleep(0.002)
            await asyncio.gather(*(bus.raw.flush() for bus in self.services))
            await self.tap.flush()
            quiet = quiet + 1 if len(self.tap.heard) == before else 0
            before = len(self.tap.heard)
            if quiet == 2:
                break
        await attacker.flush()

    async def look(self) -> Print:
        """All streams, and how far the victim's consumers are."""
        known = sorted(self.configs)
        calls = [("STREAM.LIST", None), *((f"CONSUMER.LIST.{name}", None) for name in known)]
        listed, *consumers_of = await self.apis(calls)
        found = {info["config"]["name"]: StreamPrint.of(info) for info in listed["streams"]}
        # Of one that was deleted nobody would answer, nor say that nobody does: the tap listens everywhere.
        contents = await self._contents([name for name in known if name in found])
        for name in found.keys() & contents.keys():
            found[name] = replace(found[name], contents=contents[name])
        for name, answer in zip(known, consumers_of, strict=True):
            consumers = [one for one in answer.get("consumers", []) if not _is_brokers(one)]
            if name in found:
                found[name] = replace(found[name], consumers=len(consumers))
            for one in consumers:
                kept = {key: one.get(key) for key in ("config", "delivered", "ack_floor", "num_waiting")}
                kept["delivered"] = (kept["delivered"] or {}).get("stream_seq")
                text = json.dumps(kept, sort_keys=True, default=str)
                found[f"{name}/{one['name']}"] = StreamPrint(text, 0, 0, 0, 0, 0, 0)
        return found

    async def _contents(self, streams: Sequence[str]) -> dict[str, dict[int, tuple[str, str]]]:
        """The first messages of each stream."""
        inboxes = {f"{INBOX}.contents.{self.numbers + offset}": name for offset, name in enumerate(streams)}
        self.numbers += len(streams)
        first = json.dumps({"seq": 1, "batch": DIGESTED}).encode()
        for inbox, name in inboxes.items():
            self.auditor.say(Said(f"$JS.API.DIRECT.GET.{name}", first, inbox))
        found: dict[str, dict[int, tuple[str, str]]] = {name: {} for name in streams}
        for inbox, messages in (await self.auditor.lists(inboxes)).items():
            for message in messages:
                number, subject, digest = _digest(message)
                found[inboxes[inbox]][number] = (subject, digest)
        return found

    async def api(self, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return (await self.apis([(call, body)]))[0]

    async def apis(self, calls: Sequence[tuple[str, dict[str, Any] | None]]) -> list[dict[str, Any]]:
        """Several, one behind the other."""
        inboxes = [f"{INBOX}.{self.numbers + offset}" for offset in range(1, len(calls) + 1)]
        self.numbers += len(calls)
        for (call, body), inbox in zip(calls, inboxes, strict=True):
            data = json.dumps(body).encode() if body is not None else b""
            self.auditor.say(Said(f"$JS.API.{call}", data, inbox))
        answers = await self.auditor.answers(inboxes)
        return [json.loads(answers[inbox]) for inbox in inboxes]

    def overheard(self) -> list[Heard]:
        """What the tap has heard since it was last asked, but for the auditor's own affairs."""
        found, self.tap.heard = self.tap.heard, []
        return [
            one
            for one in found
            if not one.subject.startswith(f"{INBOX}.") and not one.reply.startswith(f"{INBOX}.")
        ]

    async def lost(self) -> list[str]:
        """Of what was planted, the places where that does not stand any more, to the byte."""
        planted = [(name, one) for name, said in sorted(self.planted.items()) for one in said]
        calls = [(f"STREAM.MSG.GET.{name}", {"last_by_subj": one.subject}) for name, one in planted]
        answers = await self.apis(list(calls))
        return [
            one.subject
            for (name, one), answer in zip(planted, answers, strict=True)
            if not await self._stands(name, one, answer)
        ]

    async def _stands(self, stream: str, one: Said, answer: dict[str, Any]) -> bool:
        """Where others may have said something behind it, it is looked for from the beginning."""
        sequence = 1
        while "message" in answer:
            stored = base64.b64decode(answer["message"].get("data", ""))
            if one.payload in (stored, COUNTED):
                return True
            wanted = {"seq": sequence, "next_by_subj": one.subject}
            answer = await self.api(f"STREAM.MSG.GET.{stream}", wanted)
            sequence = answer.get("message", {}).get("seq", 0) + 1
        return False

    # --- mending -------------------------------------------------------------------------------------------

    async def mend(self, broken: Iterable[str] | None = None) -> None:
        """Makes these streams (all) anew, with what was planted in them; what was not there before goes."""
        listed = await self.api("STREAM.LIST")
        present = {info["config"]["name"] for info in listed["streams"]}
        names = self.configs.keys() if broken is None else broken
        for name in sorted(present - self.configs.keys()):
            await self.api(f"STREAM.DELETE.{name}")
        for name in sorted(names):
            if name not in self.configs:
                continue
            if name in present:
                await self.api(f"STREAM.DELETE.{name}")
            made = await self.api(f"STREAM.CREATE.{name}", self.configs[name])
            if "error" in made:
                raise NotFound(f"{name} could not be made again: {made['error']}")
            self.auditor.say(*self.planted[name])
            await self.auditor.flush()
            await self._victim(name)
        await self.tap.flush()
        self.overheard()

    async def plant(self) -> None:
        """Notes what the streams are, and stores something marked in each."""
        listed = await self.api("STREAM.LIST")
        for info in listed["streams"]:
            config = info["config"]
            name = config["name"]
            self.configs[name] = config
            self.planted[name] = [
                *self.planted.get(name, []),
                *(Said(place, content(place), "", _headers(config)) for place in places(config["subjects"])),
            ]
        await self.mend()

    async def _victim(self, stream: str) -> None:
        config = {"durable_name": VICTIM, "ack_policy": "explicit", "deliver_policy": "all"}
        await self.api(
            f"CONSUMER.DURABLE.CREATE.{stream}.{VICTIM}", {"stream_name": stream, "config": config}
        )


def _digest(stored: Heard) -> tuple[int, str, str]:
    """Of a message that was read directly: its sequence, its subject, and SHA-256 of its headers and body."""
    lines = stored.head.decode().split("\r\n")[1:]
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    kept = sorted((key, value) for key, value in headers.items() if key not in OF_THE_READING)
    whole = json.dumps(kept).encode() + b"\n" + stored.payload
    return int(headers["Nats-Sequence"]), headers["Nats-Subject"], hashlib.sha256(whole).hexdigest()


def _is_brokers(consumer: dict[str, Any]) -> bool:
    """Whether a broker made it: it delivers to who asks, and what may be read by it is looked at there."""
    pulled = "deliver_subject" not in consumer.get("config", {})
    return pulled and BROKERS_CONSUMER.match(consumer["name"]) is not None


async def _have_jobs(bus: Bus, known: JobStates) -> None:
    """Two that go on and one that ended. The guards learn of them as they do in a mesh; what they watch by is
    gone before the attacks."""
    for job in GOING_JOBS:
        await bus.bucket(subjects.JOB_RECORD).put(record_of(job, JobState.RUNNING, "it runs"), job=job)
    await bus.bucket(subjects.JOB_RECORD).put(record_of(ENDED_JOB, JobState.DONE, "it ended"), job=ENDED_JOB)
    current = asyncio.Event()

    def read() -> None:
        if ENDED_JOB in known.ended:  # not yet, if builds were read before jobs
            current.set()

    known.on_ended = read
    await known.start(bus)
    async with asyncio.timeout(60.0):
        await current.wait()
    await known.stop()
    assert (known.going, known.ended) == (set(GOING_JOBS), {ENDED_JOB})


def _headers(config: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return (("Nats-Incr", "+1"),) if config.get("allow_msg_counter") else ()


# --- services ---------------------------------------------------------------------------------------------
async def _refuse(message: Message, envelope: Envelope) -> Message:
    if isinstance(message, Resolve):
        return Resolved(revision=7, records=())
    raise NotFound("nobody is at home")


@contextlib.asynccontextmanager
async def _brokering(bus: Bus) -> AsyncIterator[None]:
    """The real one: what it decides is what is tried. It is not registered, as nobody answers there."""
    relay = Broker(bus).relay
    await bus.listen(relay)
    try:
        yield
    finally:
        await relay.stop()


async def _serve(bus: Bus, who: Identity) -> None:
    for row in SUBJECTS:
        if row.delivery is not Delivery.REQUEST or who.kind not in row.receivers:
            continue
        tokens: dict[str, Any] = {}
        if who.job and "job" in row.tokens:
            tokens["job"] = who.job
        if row.names in (Names.RECEIVER, Names.BOTH):
            own = {"sid": who.name, "agent": who.name, "gateway": who.name, "module": who.module}
            tokens |= {token: value for token, value in own.items() if token in row.tokens and value}
        await bus.serve(row, _refuse, queue_group=f"{who.kind}", **tokens)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[World]:
    """The world, ready to be attacked."""
    root = new_root()
    keys = GuardKeys.generate(root)
    users = Users(
        listed=tuple(
            User(name=str(role), role=role, token_sha256=hashlib.sha256(token.encode()).hexdigest())
            for role, token in TOKENS.items()
        )
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(folder, guard=keys, sync_always=False))
        known = JobStates()
        guards = [Guard(keys, lambda: users, report=_quietly, jobs=known) for _ in range(2)]
        for number, guard in enumerate(guards):
            await stack.enter_async_context(guard.answering([server.url], f"guard-{number}"))
        services = []
        for who in SERVICES:
            token = issue(root, who)
            bus = await stack.enter_async_context(
                Bus.connect(server.url, name=who.name, kind=who.kind, token=token, connect_timeout_s=60.0)
            )
            if who is ORCHESTRATOR:
                await streams.provision(bus.connection)
                await _have_jobs(bus, known)
                for job in ("j", "k"):
                    name = f"artifacts/{job}/weights"
                    await bus.objects.put(name, mark(f"object {name}"))
            services.append(bus)
        for bus, who in zip(services, SERVICES, strict=True):
            if who.kind is K.BROKER:
                await stack.enter_async_context(_brokering(bus))
            else:
                await _serve(bus, who)
        auditor = await stack.enter_async_context(wire(server.url, AUDITOR, "auditor"))
        auditor.listen(f"{INBOX}.>")
        tap = await stack.enter_async_context(wire(server.url, AUDITOR, "tap"))
        tap.listen(">")
        world = World(server.url, root, guards, auditor, tap, services)
        for stream in (OBJECTS, JOBS):
            stored = await _stored(world, stream)
            world.planted[stream] = [one for one in stored if one.subject not in JOB_RECORDS]
        await world.plant()
        yield world


async def _stored(world: World, stream: str) -> list[Said]:
    """The messages of a stream, to be planted again."""
    state = (await world.api(f"STREAM.INFO.{stream}"))["state"]
    found = []
    for sequence in range(state["first_seq"], state["last_seq"] + 1):
        message = (await world.api(f"STREAM.MSG.GET.{stream}", {"seq": sequence})).get("message")
        if message is not None:
            head = base64.b64decode(message.get("hdrs", "")).decode()
            pairs = (line.partition(":") for line in head.split("\r\n")[1:] if line)
            headers = tuple((key, value.strip()) for key, _, value in pairs)
            found.append(Said(message["subject"], base64.b64decode(message.get("data", "")), "", headers))
    return found


def _quietly(event: str, **fields: str) -> None:
    pass
