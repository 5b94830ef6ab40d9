"""A reply subject is a place where somebody else writes: who may name which, and who may answer there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.nats import reply_subjects
from bus.nats.reply_subjects import inbox_of, inbox_of_token
from bus.security.credentials import delegate, issue
from bus.security.identity import Identity
from bus.subject_row import Delivery
from bus.subjects import SUBJECTS
from bus.wire import codec, request_progress
from bus.wire.request_progress import RequestProgress
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope, Sender
from schemas.errors import Ack
from schemas.registry import InstanceState, Resolve, Resolved, StateChange
from schemas.signals import Role
from schemas.step import Exported, ExportOrder, Member
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.raw_connection import raw_connection
from tests.patience import PATIENCE_S
from tests.waiting import eventually

AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
INSTANCE = Identity(name="j-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job="j")
MODULE = Identity(name="mine", kind=K.FUNCTIONAL_MODULE, module="mine")
REGISTRY = Identity(name="service-registry", kind=K.SERVICE_REGISTRY)
SMO = Identity(name="orchestrator", kind=K.ORCHESTRATOR)
RANDOM = "0123456789abcdef"
SENT = Sender(name=INSTANCE.name, kind=K.INSTANCE, incarnation="x")
QUESTION = codec.encode(Resolve(), codec.sender_map(SENT), "q1")
CHANGE = codec.encode(
    StateChange(sid=INSTANCE.name, incarnation="x", state=InstanceState.ACTIVE), codec.sender_map(SENT), "q2"
)


def token_of(mesh: Guarded, who: Identity) -> str:
    if who.kind is K.INSTANCE:
        return delegate(issue(mesh.root, AGENT), who) or ""
    return issue(mesh.root, who)


def reply(subject: str, payload: bytes, *, asker: str = "", answerer: str = "service-registry._") -> str:
    """As `INSTANCE` itself would name it."""
    asker = asker or inbox_of(INSTANCE.kind, INSTANCE.name)
    return f"{asker}.{RANDOM}.{answerer}.{reply_subjects.question(subject, payload, answerer)}"


async def test_who_is_asked_answers_in_its_own_name_and_nobody_gets_a_right_by_being_asked(
    mesh: Guarded,
) -> None:
    """The old way up: to send oneself a message whose reply is where one wants to write, and to answer it."""
    asked = f"_INBOX.orchestrator.orchestrator.{RANDOM}"
    own = "instance.j-s0-r0"
    who_may = {
        f"{asked}.{own}.q": {"j-s0-r0"},
        f"{asked}.instance.j-s1-r0.q": set(),
        f"{asked}.instance._.q": set(),
        f"{asked}.service-registry._.q": {"service-registry"},
        f"{asked}.functional-module.mine.q": {"mine"},
        f"{asked}.cluster.a-n.q": {"a-n"},
        f"{asked}.jetstream._.q": set(),
        f"{asked}.self._.q": {"orchestrator"},
        f"{asked}.any.orchestrator.q": set(),
        f"{asked}.q": set(),
        "$KV.users.me": set(),
        "$KV.revocations.user.me": set(),
    }
    for who in (INSTANCE, AGENT, MODULE, REGISTRY, SMO):
        inbox = inbox_of(who.kind, who.name)
        async with raw_connection(mesh.url, token_of(mesh, who), who.name, who.kind) as connection:
            connection.writer.write(f"SUB {inbox}.> me\r\n".encode())
            for target in who_may:
                connection.writer.write(f"PUB {inbox}.{RANDOM}.self._.1 {target} 0\r\n\r\n".encode())
            await connection.until_pong()
            assert await connection.denied(publish=who_may) == {
                target for target, allowed in who_may.items() if who.name not in allowed
            }, who


async def test_a_user_who_sends_a_message_to_itself_may_not_answer_it(mesh: Guarded) -> None:
    for role in (Role.VIEWER, Role.RESEARCHER, Role.OPERATOR):
        inbox = inbox_of_token(TOKENS[role])
        async with raw_connection(mesh.url, TOKENS[role], f"{role}-one") as connection:
            connection.writer.write(f"SUB {inbox}.> me\r\n".encode())
            connection.writer.write(f"PUB {inbox}.{RANDOM}.self._.1 $KV.users.me 0\r\n\r\n".encode())
            heard = await connection.until_pong()
            assert any(b"$KV.users.me" in line for line in heard), "the message never came"
            assert await connection.denied(publish=["$KV.users.me"]) == {"$KV.users.me"}


def astray(subject: str, payload: bytes) -> dict[str, str]:
    """Replies that an instance may name, and that no service may answer to."""
    own = inbox_of(INSTANCE.kind, INSTANCE.name)
    another = reply(subject, payload + b"x")
    return {
        "a key": "$KV.steps.j",
        "a stream": subjects.AUDIT(authorizer="authorizer"),
        "an order": subjects.CANCEL(),
        "an object": "$O.artifacts.M.x",
        "the server": "$SYS.REQ.SERVER.PING",
        "JetStream": "$JS.API.STREAM.DELETE.AUDIT",
        "no inbox of ours": "_INBOX.abc.1",
        "an inbox below one": reply(subject, payload) + ".more",
        "wildcards": f"_INBOX.*.*.{RANDOM}.service-registry._.{RANDOM}{'0' * 24}",
        "another's inbox": reply(subject, payload, asker=inbox_of(K.GATEWAY, "gateway-a")),
        "a user's inbox": reply(subject, payload, asker=inbox_of_token("hers")),
        "another kind's": reply(subject, payload, asker=inbox_of(K.CLIENT, INSTANCE.name)),
        "another answerer": reply(subject, payload, answerer="orchestrator._"),
        "oneself": reply(subject, payload, answerer="self._"),
        "another question": another,
        "no digest": f"{own}.{RANDOM}.service-registry._.{RANDOM}",
        "nowhere": "",
    }


@pytest.mark.parametrize("many", [False, True], ids=["one", "batches"])
async def test_services_answer_to_the_inbox_of_who_asks_for_this_and_nowhere_else(
    mesh: Guarded, many: bool
) -> None:
    handled: list[str] = []

    async def one(message: Resolve, envelope: Envelope) -> Resolved:
        handled.append(envelope.id)
        return Resolved(revision=7, records=())

    async def batch(asked: Sequence[tuple[Any, Envelope]]) -> list[Ack]:
        handled.extend(envelope.id for _, envelope in asked)
        return [Ack() for _ in asked]

    subject = subjects.STATE_CHANGE(sid=INSTANCE.name) if many else subjects.RESOLVE()
    payload = CHANGE if many else QUESTION
    wrong = astray(subject, payload)
    registry_bus = Bus.connect(
        mesh.url, name=REGISTRY.name, kind=REGISTRY.kind, token=token_of(mesh, REGISTRY)
    )
    tap_bus = Bus.connect(mesh.url, name="tap", kind=K.TAP, token=mesh.root)
    async with (
        registry_bus as registry,
        tap_bus as tap,
        raw_connection(mesh.url, token_of(mesh, INSTANCE), INSTANCE.name, K.INSTANCE) as attacker,
    ):
        if many:
            await registry.serve_batches(subjects.STATE_CHANGE, batch)
        else:
            await registry.serve(subjects.RESOLVE, one)
        heard: set[str] = set()

        async def arrived(message: Any) -> None:
            heard.add(message.subject)

        for target in filter(None, wrong.values()):
            if not target.startswith("$SYS") and "*" not in target:
                await tap.connection.subscribe(target, arrived)
        for target in (*wrong.values(), *wrong.values()):  # a repetition is no better
            attacker.writer.write(f"PUB {subject} {target} {len(payload)}\r\n".encode() + payload + b"\r\n")
        right = reply(subject, payload)
        attacker.writer.write(f"SUB {right} me\r\n".encode())
        attacker.writer.write(f"PUB {subject} {right} {len(payload)}\r\n".encode() + payload + b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while not (await attacker.reader.readline()).startswith(f"MSG {right}".encode()):
                pass
        await registry.barrier()
        await tap.barrier()
        assert handled == ["q1" if not many else "q2"]
        assert heard == set()
        assert registry.counters.dead_letters == 2 * len(wrong)


async def test_another_question_under_a_known_id_gets_an_answer_of_its_own(mesh: Guarded) -> None:
    """A remembered answer belongs to who asked, and to what was asked."""
    ran: list[str | None] = []

    async def resolve(message: Resolve, envelope: Envelope) -> Resolved:
        ran.append(message.prefix)
        return Resolved(revision=len(ran), records=())

    def bus_of(who: Identity) -> Any:
        return Bus.connect(mesh.url, name=who.name, kind=who.kind, token=token_of(mesh, who), incarnation="i")

    async with bus_of(REGISTRY) as registry, bus_of(INSTANCE) as one, bus_of(MODULE) as other:
        await registry.serve(subjects.RESOLVE, resolve)

        async def ask(bus: Bus, prefix: str) -> int:
            payload = codec.encode(Resolve(prefix=prefix), bus.sender_map, "the-id")
            answer = await bus.connection.ask(
                subjects.RESOLVE(), payload, timeout_s=PATIENCE_S, answerer=subjects.RESOLVE.answerer({})
            )
            found = codec.decode_answer(answer.data)
            assert isinstance(found, Resolved)
            return found.revision

        assert await ask(one, "a") == 1
        assert await ask(one, "b") == 2
        assert await ask(other, "a") == 3
        assert ran == ["a", "b", "a"]


async def test_word_of_progress_comes_from_who_may_answer_and_from_nobody_else(mesh: Guarded) -> None:
    """It takes the answer's way, with the answer's right: who reads along has none."""
    other = Identity(name="j-s1-r0", kind=K.INSTANCE, cluster="a", node="n", job="j")
    order = ExportOrder(job="j", epoch=1, version=1, url="bus://a", shard="s")
    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    forged = asyncio.Event()

    async def export(message: ExportOrder, envelope: Envelope) -> Exported:
        request_progress.moved(3)
        await forged.wait()
        return Exported(member=Member(sid=INSTANCE.name, incarnation="i"), version=1, url="bus://a", bytes=9)

    async def overheard(message: Any) -> None:
        if not asked.done():
            asked.set_result(message.reply)

    async with (
        Bus.connect(mesh.url, name=SMO.name, kind=SMO.kind, token=token_of(mesh, SMO)) as smo,
        Bus.connect(
            mesh.url, name=INSTANCE.name, kind=K.INSTANCE, token=token_of(mesh, INSTANCE)
        ) as instance,
        Bus.connect(mesh.url, name="tap", kind=K.TAP, token=mesh.root) as tap,
        raw_connection(mesh.url, token_of(mesh, other), other.name, K.INSTANCE, headers=True) as stranger,
    ):
        await tap.connection.subscribe(subjects.EXPORT(job="j", sid=INSTANCE.name), overheard)
        await instance.serve(subjects.EXPORT, export, job="j", sid=INSTANCE.name)
        exporting = asyncio.create_task(
            smo.command(
                subjects.EXPORT,
                order,
                deadline_s=PATIENCE_S,
                moving=RequestProgress(),
                job="j",
                sid=INSTANCE.name,
            )
        )
        inbox = await asyncio.wait_for(asked, PATIENCE_S)
        head = f"NATS/1.0\r\n{request_progress.SO_FAR}: 99\r\n\r\n".encode()
        stranger.writer.write(f"HPUB {inbox} {len(head)} {len(head)}\r\n".encode() + head + b"\r\n")
        lines = await stranger.until_pong()
        assert any(b"Permissions Violation for Publish" in line and inbox.encode() in line for line in lines)
        await eventually(lambda: [each.so_far for each in smo.connection._questions._open.values()] == [3])
        forged.set()
        assert (await exporting).bytes == 9


def test_each_request_names_who_answers_it_and_nothing_else_does() -> None:
    for row in SUBJECTS:
        if row.delivery is not Delivery.REQUEST:
            continue
        tokens = {token: f"t{number}" for number, token in enumerate(row.tokens)}
        assert row.answerer(tokens) == row.answerer_on(row(**tokens)), row.name
        several = len(row.receivers) > 1
        assert (row.answered_by == "any") == several
        if several or row.receivers & {K.INSTANCE, K.CLUSTER, K.FUNCTIONAL_MODULE}:
            assert row.answerer_token is not None, f"{row.name}: any of its kind could answer for another"
