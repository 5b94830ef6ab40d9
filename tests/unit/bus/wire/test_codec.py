"""The envelope on the wire."""

from __future__ import annotations

import gc

import msgpack
import pytest

from bus.wire import codec
from schemas.base import MESSAGE_TYPES, Message
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage
from schemas.registry import Heartbeat, InstanceState, ServiceRecord, TensorSchema
from schemas.telemetry import DeadLetter
from tests.builders.records import instance

SENDER = codec.sender_map(Sender(name="a", kind=EntityKind.CLIENT, incarnation="i1"))
RECORD = instance(input_schema=(TensorSchema(shape=(1, 2), dtype="float32"),), tags=("x", "y"))


def changed(data: bytes, **fields) -> bytes:
    return msgpack.packb(msgpack.unpackb(data) | fields)


def reason(data: bytes, expected: type[Message] | None = None) -> str:
    with pytest.raises(BadMessage) as error:
        codec.decode(data, expected)
    assert "\n" not in error.value.text
    return error.value.fields["reason"]


@pytest.mark.parametrize(
    "message",
    [
        RECORD,
        Heartbeat(sid="a", incarnation="i", state=InstanceState.PENDING),
        DeadLetter(service="a", subject="s", reason="r", size=3, head=b"\x00\xff\xc1"),
    ],
)
def test_round_trip(message: Message) -> None:
    back, envelope = codec.decode(codec.encode(message, SENDER, "i1-1", "cause"), type(message))
    assert back == message
    assert type(back) is type(message)
    assert (envelope.id, envelope.causation, envelope.sender.name) == ("i1-1", "cause", "a")
    assert envelope.version == message.wire_version
    assert envelope.sent_at > 1_600_000_000


def test_unusable_messages_say_why() -> None:
    good = codec.encode(RECORD, SENDER, "i1-1")
    body = msgpack.unpackb(good)["body"]
    assert reason(b"\xc1") == "malformed"
    assert reason(good[:-1]) == "malformed"
    assert reason(good + b"x") == "malformed"
    assert reason(msgpack.packb([1])) == "envelope"
    assert reason(changed(good, version="1.0")) == "envelope"
    assert reason(changed(good, sender=SENDER.fields | {"name": "no token!"})) == "envelope"
    assert reason(changed(good, type="nobody.knows")) == "unknown type"
    assert reason(good, Heartbeat) == "wrong type"
    assert reason(changed(good, version=(2, 0))) == "wrong version"
    assert reason(changed(good, version=(0, 9))) == "wrong version"
    assert reason(changed(good, body=body | {"added": 1})) == "invalid body"
    assert reason(changed(good, body={})) == "invalid body"
    assert reason(b"\x00" * (codec.MAX_MESSAGE_BYTES + 1)) == "oversized"


def test_a_newer_minor_version_is_read_with_unknown_fields_ignored_at_every_depth() -> None:
    good = codec.encode(RECORD, SENDER, "i1-1")
    body = msgpack.unpackb(good)["body"]
    body["added"] = {"deep": [1]}
    body["endpoint"]["added"] = 1
    body["input_schema"][0]["added"] = 2
    newer = changed(good, version=(1, 9), body=body, added_to_envelope="x")
    assert codec.decode(newer, ServiceRecord)[0] == RECORD
    assert reason(changed(newer, version=(1, 0))) == "invalid body"


def test_an_older_sender_lacks_fields_that_have_defaults() -> None:
    good = codec.encode(RECORD, SENDER, "i1-1")
    body = msgpack.unpackb(good)["body"]
    for field in ("tags", "input_schema", "version", "reason"):
        del body[field]
    back, _ = codec.decode(changed(good, body=body))
    assert back == RECORD.model_copy(update={"tags": (), "input_schema": ()})


def test_an_encoder_that_failed_encodes_again() -> None:
    with pytest.raises(BadMessage):
        codec.encode(RECORD.model_copy(update={"route_id": 1 << 70}), SENDER, "i1-1")
    assert codec.decode(codec.encode(RECORD, SENDER, "i1-2"))[0] == RECORD


def test_a_known_sender_does_not_excuse_an_unknown_one() -> None:
    good = codec.encode(RECORD, SENDER, "i1-1")
    codec.decode(good)
    for bad in ({"name": ["list"]}, {"kind": "nobody"}, {"incarnation": 7}, {"name": "a.b"}):
        assert reason(changed(good, sender=SENDER.fields | bad)) == "envelope"
    for no_sender in (None, 5, "text", [], {}):
        assert reason(changed(good, sender=no_sender)) == "envelope"
    codec.decode(good)


def test_answers_are_checked_as_well() -> None:
    good = codec.encode(RECORD, SENDER, "i1-1")
    assert codec.decode_answer(good) == RECORD
    wrong = ({"type": 5}, {"type": None}, {"version": 3}, {"version": ["x"]}, {"body": []}, {"type": "no"})
    for fields in wrong:
        with pytest.raises(BadMessage):
            codec.decode_answer(changed(good, **fields))
    for data in (b"", b"\xc1", msgpack.packb([]), msgpack.packb({})):
        with pytest.raises(BadMessage):
            codec.decode_answer(data)


def test_values_of_users_are_not_in_the_complaint() -> None:
    good = codec.encode(RECORD, SENDER, "i1-1")
    with pytest.raises(BadMessage) as error:
        codec.decode(changed(good, body=msgpack.unpackb(good)["body"] | {"state": "s3cret"}))
    assert "s3cret" not in error.value.text


def test_what_cannot_be_encoded_says_so() -> None:
    with pytest.raises(BadMessage, match="cannot be encoded"):
        codec.encode(RECORD.model_copy(update={"route_id": 1 << 70}), SENDER, "i1-1")
    with pytest.raises(BadMessage, match="object store"):
        codec.encode(RECORD.model_copy(update={"reason": "x" * (9 << 20)}), SENDER, "i1-1")


def test_every_declared_type_is_found_by_its_wire_name() -> None:
    for wire, cls in MESSAGE_TYPES.items():
        assert cls.wire_type == wire


def test_the_collector_is_back_after_a_large_message_whatever_it_held() -> None:
    large = Heartbeat(sid="a", incarnation="i1", state=InstanceState.ACTIVE, digest="x" * codec.LARGE_BYTES)
    data = codec.encode(large, SENDER, "1")
    assert codec.decode(data)[0] == codec.decode_answer(data) == large
    with pytest.raises(BadMessage):
        codec.decode(data[:-1])
    assert gc.isenabled()
    gc.disable()  # somebody else's decision stays
    try:
        assert codec.decode_answer(data) == large
        assert not gc.isenabled()
    finally:
        gc.enable()
