"""Messages that were made to fill memory and to keep a loop busy: refused for little, on every row."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from nats.aio.msg import Msg

from bus.broker.relay import BrokerRelay
from bus.connection import Bus
from bus.guard.broker_caller import BrokerCaller
from bus.messaging.object_store import CHUNK_BYTES
from bus.subject_row import ANSWER_BYTES, Delivery, Subject
from bus.subjects import STEP_FENCE, STEP_STATUS, SUBJECTS
from bus.wire import codec
from schemas.base import MESSAGE_TYPES
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage
from schemas.step import HeldHop, Member, MicrobatchState, StepFenced, StepStatusReply
from tests.builders.steps import claim

ENVELOPE = {
    "type": "",
    "version": [1, 0],
    "sender": {"name": "a", "kind": "client", "incarnation": "i"},
    "id": "x",
    "causation": None,
    "sent_at": 1.0,
}
ATOMS = {
    "number": b"\x01",
    "large number": b"\xce\x11\x22\x33\x44",
    "list": b"\x90",
    "map": b"\x80",
    "text": b"\xa2ab",
    "longer text": b"\xaa0123456789",
    "nothing": b"\xc0",
}
DENSE = frozenset(ATOMS) - {"large number", "longer text"}
"""Which can't be read for what they would take, whatever is made of them."""


def in_envelope(row: Subject, body: bytes) -> bytes:
    head = {**ENVELOPE, "type": row.schema.wire_type, "version": list(row.schema.wire_version)}
    packed: bytes = msgpack.packb(head)
    assert packed[0] == 0x86
    return b"\x87" + packed[1:] + b"\xa4body" + body


def array(items: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + items


def shapes(row: Subject, size: int) -> Iterator[tuple[str, bytes]]:
    """Messages of about `size` bytes that begin as the row's do. Each field of it is made of rubbish once."""
    fields = list(row.schema.model_fields) or ["nothing"]
    for index, (name, atom) in enumerate(ATOMS.items()):
        count = size // len(atom)
        wide = array(atom * count, count)
        inner = min(count, 60_000)
        nested = array(array(atom * inner, inner) * (count // inner), count // inner)
        field = msgpack.packb(fields[index % len(fields)])
        yield f"{name}, wide", in_envelope(row, b"\x81" + field + wide)
        yield f"{name}, in lists", in_envelope(row, b"\x81" + field + nested)
    keys = min(60_000, size // 12)
    pairs = b"".join(b"\xa8%08d\x01" % key for key in range(keys))
    yield "unknown keys", in_envelope(row, b"\xdf" + keys.to_bytes(4, "big") + pairs)
    yield "deep lists", in_envelope(row, b"\x91" * size)
    yield "deep maps", in_envelope(row, b"\x81\xa1a" * (size // 3))
    yield "long text", in_envelope(row, b"\x81" + msgpack.packb(fields[0]) + msgpack.packb("x" * size))
    yield "no end", in_envelope(row, b"\x81" + msgpack.packb(fields[0]) + array(b"", size))


@pytest.mark.parametrize("row", SUBJECTS, ids=lambda row: row.name)
def test_eight_megabytes_on_a_row_are_refused_before_they_are_read(
    row: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msgpack, "unpackb", None)
    with pytest.raises(BadMessage, match="where 1,048,576 are the most") as caught:
        codec.refuse_oversized(row, b"\x90" * codec.MAX_MESSAGE_BYTES)
    assert caught.value.fields["reason"] == "oversized"
    assert row.name in caught.value.text
    codec.refuse_oversized(row, b"\x90" * codec.MOST_NOTICE_BYTES)


@pytest.mark.parametrize(
    "row", [row for row in SUBJECTS if row.delivery is Delivery.REQUEST], ids=lambda row: row.name
)
def test_an_answer_that_is_larger_than_its_row_says_is_refused_before_it_is_read(
    row: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msgpack, "unpackb", None)
    with pytest.raises(BadMessage, match=f"where {row.answer_bytes:,} are the most") as caught:
        codec.refuse_oversized_answer(row, b"\x90" * (row.answer_bytes + 1))
    assert caught.value.fields["reason"] == "oversized answer"
    assert row.name in caught.value.text
    codec.refuse_oversized_answer(row, b"\x90" * row.answer_bytes)


def test_nobody_below_the_control_plane_gives_large_answers() -> None:
    """What a job, a node or a module answers keeps who asked for less than a tenth of a second."""
    below = {EntityKind.INSTANCE, EntityKind.CLUSTER, EntityKind.FUNCTIONAL_MODULE}
    larger = {row.name: row.answer_bytes for row in SUBJECTS if row.answer_bytes != ANSWER_BYTES}
    theirs = {row.name for row in SUBJECTS if row.receivers & below}
    assert {name: size for name, size in larger.items() if name in theirs} == dict.fromkeys(
        ("step status", "step fence"), 2 << 20
    )
    assert set(larger.values()) == {2 << 20, codec.MAX_MESSAGE_BYTES}


def test_the_account_of_the_largest_step_is_an_answer() -> None:
    name = "n" * 70  # a job's of 60 characters, and what an instance adds
    member = Member(sid=name, incarnation="abcdef012345")
    largest = {"job": "j" * 60, "epoch": 99, "step": 1 << 40, "attempt": 9, "stage": 99}
    claims = tuple(
        claim(index, member, **largest, upstream=name, loss=1.25, forward_ms=1.25, backward_ms=1.25)
        for index in range(4096)
    )
    state = next(iter(MicrobatchState))
    hops = tuple(
        HeldHop(microbatch=index, state=state, upstream=member, downstream=member) for index in range(1024)
    )
    sender = codec.sender_map(_sender())
    for row, answer in (
        (STEP_STATUS, StepStatusReply(member=member, version=1, attempt=1, claims=claims)),
        (STEP_FENCE, StepFenced(member=member, version=1, round=1, held=hops, claims=claims)),
    ):
        codec.refuse_oversized_answer(row, codec.encode(answer, sender, "x"))


class Answers:
    """A bus of which a broker needs no more than where its answers go."""

    def __init__(self) -> None:
        self.connection = self
        self.sender = SimpleNamespace(name="broker")
        self.counters = SimpleNamespace(dead_letters=0, reported=set())
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def send(self, subject: str, data: bytes, **_: object) -> None:
        self.sent.append((subject, json.loads(data)))

    def bucket(self, *_: object) -> None:
        """Jobs' records: nothing that is refused for its size asks for them."""

    async def publish(self, *_: object, **__: object) -> None:
        """Dead letters."""


async def test_a_broker_reads_nothing_of_a_call_above_a_notices_size_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, asker = Answers(), BrokerCaller("client", "any", "viewer")
    relay = BrokerRelay(cast(Bus, bus))
    assert CHUNK_BYTES < codec.MOST_NOTICE_BYTES, "the largest write that anybody makes is let through"
    monkeypatch.setattr(msgpack, "unpackb", None)
    data = b"\x91" * (codec.MOST_NOTICE_BYTES + 1)
    await relay._relay(asker, Msg(cast(Any, bus), asker.subject, f"{asker.inbox}.1", data))
    ((reply, answer),) = bus.sent
    assert reply == f"{asker.inbox}.1"
    assert answer["error"]["code"] == 400
    assert "where 1,048,576 are the most" in answer["error"]["description"]
    assert bus.counters.dead_letters == 1
    bus.sent.clear()
    await relay._relay(asker, Msg(cast(Any, bus), asker.subject, "_INBOX.another.1", data))
    assert not bus.sent


def test_what_is_read_of_a_hostile_message_takes_little_memory_and_time() -> None:
    """As much of it as is let through, on every twelfth row and all whose maps have keys of data; the largest
    that streams and buckets may hold, on two. Time is this thread's own, beside that of reading as many bytes
    of an honest message."""
    record = {f"field-{key}": f"a value of {key}" for key in range(20)}
    honest = msgpack.packb([record] * (codec.MOST_NOTICE_BYTES // len(msgpack.packb(record))))
    usual_s = min(_seconds(lambda: msgpack.unpackb(honest)) for _ in range(5))
    open_rows = [row for row in SUBJECTS if codec._most_keys(row.schema) == codec.MOST_KEYS]
    assert open_rows
    tried = 0
    for row in {row.name: row for row in (*SUBJECTS[::12], *open_rows[:4])}.values():
        for name, data in shapes(row, codec.MOST_NOTICE_BYTES - 2_000):
            assert len(data) <= codec.MOST_NOTICE_BYTES
            spent_s = min(_seconds(lambda data=data, row=row: _refused(data, row)) for _ in range(2))
            assert spent_s < 15 * usual_s, (row.name, name, spent_s / usual_s)
            tried += 1
    assert tried > 100
    row = open_rows[0]
    for name, data in shapes(row, codec.MOST_NOTICE_BYTES - 2_000):
        tracemalloc.start()
        _refused(data, row)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 << 20, (name, peak >> 20)


def test_what_was_made_to_fill_memory_is_refused_for_its_density() -> None:
    (row,) = [row for row in SUBJECTS if row.name == "job record"]
    reasons = set()
    for name, data in shapes(row, codec.MAX_MESSAGE_BYTES - 2_000):
        with pytest.raises(BadMessage) as caught:
            codec.decode(data, row.schema)
        assert len(caught.value.text) < 300, name
        kind = name.partition(",")[0]
        if kind in DENSE:
            assert caught.value.fields["reason"] in ("dense", "malformed"), name
        reasons.add(caught.value.fields["reason"])
    assert {"dense", "malformed", "invalid body"} <= reasons


def test_a_million_things_that_do_not_fit_are_one_complaint() -> None:
    (row,) = [row for row in SUBJECTS if row.name == "job record"]
    cls = MESSAGE_TYPES["job.list"]
    data = in_envelope(row, b"\x81\xa4jobs" + array(b"\x01" * 5_000, 5_000))
    body = data.replace(msgpack.packb(row.schema.wire_type), msgpack.packb(cls.wire_type))
    with pytest.raises(BadMessage, match=r"jobs\.0: .*dictionary[^(]*$"):  # "(and 4999 more)" took seconds
        codec.decode(body.replace(b"\x92\x01\x08", b"\x92\x01\x00"), cls)
    many = in_envelope(row, msgpack.packb({f"k{key}": 1 for key in range(5_000)}))
    with pytest.raises(BadMessage, match=r"job\.record: 50\d\d problems"):
        codec.decode(many, row.schema)


def test_large_honest_messages_are_read() -> None:
    from schemas.telemetry import DeadLetter  # the smallest that may be long

    sender = codec.sender_map(_sender())
    letter = DeadLetter(service="a", subject="b", reason="c" * 900_000, size=1, head=b"")
    data = codec.encode(letter, sender, "x")
    assert codec.decode(data, DeadLetter)[0] == letter


def _sender() -> Sender:
    return Sender(name="a", kind=EntityKind.CLIENT, incarnation="i")


def _refused(data: bytes, row: Subject) -> None:
    with pytest.raises(BadMessage):
        codec.decode(data, row.schema)


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
