"""Decoding by the table, and what a line shows: every row, every kind of damage."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgpack
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bus import subjects
from bus.subjects import SUBJECTS
from bus.tap import rendering
from bus.tap.live_tap import SubjectRate
from bus.tap.message import decode
from bus.wire import codec
from schemas.envelope import EntityKind, Sender
from schemas.names import MESH
from schemas.policy import SetWeights
from schemas.redaction import redact
from schemas.signals import AccessRequest
from schemas.telemetry import InstanceSample
from tests.builders.policies import suggestion

SENDER = codec.sender_map(Sender(name="me", kind=EntityKind.TAP, incarnation="i1"))


def example(model: type[BaseModel]) -> Any:
    """The smallest valid value of a schema: required fields only."""
    return model.model_validate(
        {name: value_of(field) for name, field in model.model_fields.items() if field.is_required()}
    )


def value_of(field: FieldInfo) -> Any:
    rules = str(field.metadata)
    if "[0-9a-f]{32}" in rules:
        return "0" * 32
    if "[0-9a-f]{64}" in rules:
        return "0" * 64
    if "MinLen(min_length=1)" in rules and get_origin(field.annotation) is tuple:
        return [candidates(get_args(field.annotation)[0])[0]]
    return "module:callable" if ":" in rules else candidates(field.annotation)[0]


def candidates(kind: Any) -> list[Any]:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return candidates(args[0])
    if origin is Literal:
        return [args[0]]
    if origin in (Union, types.UnionType):
        return [None] if type(None) in args else candidates(args[0])
    if origin is tuple:
        return [()] if not args or args[-1] is Ellipsis else [tuple(candidates(arg)[0] for arg in args)]
    if origin is dict:
        return [{}]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [example(kind).model_dump()]
    if isinstance(kind, type) and hasattr(kind, "__members__"):
        return [next(iter(kind))]
    return [{int: 1, float: 1.0, str: "x", bool: False, bytes: b"x"}[kind]]


@pytest.mark.parametrize("row", SUBJECTS, ids=lambda row: row.name)
def test_every_rows_message_is_decoded_and_shown(row):
    message = example(row.schema)
    subject = row(**dict.fromkeys(row.tokens, "t"))
    tapped = decode(subject, codec.encode(message, SENDER, "e-1"), at=0.0)
    assert tapped.problem == ""
    assert tapped.row is row
    assert tapped.message == type(message).model_validate(redact(type(message), message.model_dump()))
    assert tapped.envelope is not None
    assert tapped.envelope.sender.name == "me"
    line = str(rendering.render(tapped))
    assert row.name in line
    assert "\n" not in line
    assert json.loads(rendering.as_json(tapped))["row"] == row.name


WEIGHTS = suggestion(SetWeights(stage=0, weights={"a": 1.0, "b": 0.5}), reason="two words")
GOOD = codec.encode(WEIGHTS, SENDER, "e-1")
SUBJECT = subjects.SUGGESTION(owner=MESH, module="m")


@pytest.mark.parametrize("cut", [0, 1, 5, 40, len(GOOD) // 2, len(GOOD) - 1])
def test_truncated_msgpack_is_a_problem_not_a_crash(cut):
    tapped = decode(SUBJECT, GOOD[:cut], at=0.0)
    assert tapped.message is None
    assert tapped.problem
    line = rendering.render(tapped)
    assert line.tone == "problem"
    assert f"unreadable, {cut:,} bytes" in line.summary
    assert json.loads(rendering.as_json(tapped))["problem"] == tapped.problem


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"type": "no.such"}, "unknown type"),
        ({"type": "telemetry.log"}, "telemetry.log where policy.suggestion belongs"),
        ({"version": [9, 0]}, "this service reads 1.x"),
        ({"body": {}}, "policy.suggestion: module"),
        ({"body": 3}, "envelope: body"),
        ({"sender": None}, "envelope: sender"),
    ],
)
def test_what_is_wrong_is_said_and_the_sender_is_known_where_it_can_be(change, problem):
    data = msgpack.packb(msgpack.unpackb(GOOD) | change)
    tapped = decode(SUBJECT, data, at=0.0)
    assert problem in tapped.problem
    assert (tapped.envelope is None) == problem.startswith("envelope")


def test_arbitrary_bytes_on_a_foreign_subject():
    tapped = decode("some.thing.else", b"\xff\x00not ours", at=0.0)
    assert tapped.row is None
    assert rendering.render(tapped).what == "unknown subject"
    assert "b'\\xff\\x00not ours'" in rendering.render_raw(tapped)


def test_a_newer_minor_version_is_read():
    data = msgpack.unpackb(GOOD)
    data["version"] = [1, 8]
    data["body"]["invented_later"] = 1
    assert decode(SUBJECT, msgpack.packb(data), at=0.0).message is not None


def test_key_value_marks_are_words():
    key = subjects.ROUTE_TABLE(job="j", cluster="east", stage=0)
    assert decode(key, b"", at=0.0, operation="DEL").note == "deleted"
    assert decode(key, b"", at=0.0, operation="MaxAge").note == "expired"
    assert rendering.render(decode(key, b"", at=0.0, operation="DEL")).summary == "deleted"


def test_a_line_has_the_fields_that_say_something():
    line = rendering.render(decode(SUBJECT, GOOD, at=0.0))
    assert (line.sender, line.subject, line.what) == ("me", "policy.suggestion.system.m", "policy suggestion")
    assert line.summary == (
        "version=1 job=j action={action=set_weights stage=0 weights={a=1 b=0.5}} confidence=0.8 "
        'reason="two words" input_revision=1 valid_s=60'
    )
    sample = InstanceSample(
        job="j", sid="s", incarnation="i", cluster="c", node="n", stage=0, step=4, queue=2
    )
    data = codec.encode(sample, SENDER, "e")
    line = rendering.render(decode(subjects.INSTANCE_SAMPLE(job="j", sid="s"), data, at=0.0))
    assert line.summary == "incarnation=i cluster=c node=n stage=0 step=4 queue=2"  # no job, sid, no defaults


def test_a_bearer_token_is_never_shown_not_even_of_a_damaged_request():
    request = AccessRequest(token="s3cret", action="job.read", resource="j", gateway="a")
    good = codec.encode(request, SENDER, "e")
    envelope = msgpack.unpackb(good)
    envelope["body"]["action"] = 7
    for data in (good, msgpack.packb(envelope)):
        tapped = decode(subjects.ACCESS(gateway="a"), data, at=0.0)
        shown = str(rendering.render(tapped)) + rendering.as_json(tapped) + rendering.render_raw(tapped)
        assert "s3cret" not in shown
        assert "***" in rendering.as_json(tapped)


def test_the_table_of_rates():
    lines = rendering.render_rates([SubjectRate("notice", 1234.5, 99_000.0, 5000)], seen=5001, dropped=1)
    assert lines[1].split() == ["1,234.5", "99.0", "5,000", "notice"]
    assert lines[-1] == "5,001 seen, 1 dropped"
