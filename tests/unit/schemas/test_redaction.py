"""Secrets go by the schema's own marks, at any depth, and whatever shape the body really has."""

from __future__ import annotations

from typing import Annotated

import pytest

from schemas.base import MESSAGE_TYPES, Part
from schemas.gateway_api import DoorRequest
from schemas.job import JobRecord
from schemas.marks import HOLDS_USER_VALUES, PRIVATE, SECRET, EnvelopeId, Secret, Url
from schemas.policy import PolicyDecision
from schemas.redaction import HIDDEN, masks_of, redact, references
from schemas.services.generation import (
    BindSession,
    GeneratedToken,
    Generation,
    Sampling,
    SessionBound,
    WaveTokens,
)
from schemas.services.prediction import NamedTensor, Predict, Predicted, PredictedItem, PredictItem
from schemas.signals import AccessRequest
from schemas.step import Member, MicrobatchClaim
from schemas.telemetry import LogLine
from tests.builders.jobs import spec


class Inner(Part):
    password: Secret
    plain: str = "p"


class Outer(Part):
    one: Inner | None = None
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}
    keys: tuple[Annotated[bytes, SECRET], ...] = ()
    source: Url = ""
    args: Annotated[dict[str, object], HOLDS_USER_VALUES] = {}
    about: EnvelopeId = ""
    said: Annotated[tuple[tuple[int, float, str], ...] | None, PRIVATE] = None


INNER = {"password": "s3cret", "plain": "p"}
SHOWN = {"password": HIDDEN, "plain": "p"}


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"one": INNER}, {"one": SHOWN}),
        ({"one": None}, {"one": None}),
        ({"many": [INNER, INNER]}, {"many": [SHOWN, SHOWN]}),
        ({"named": {"a": INNER}}, {"named": {"a": SHOWN}}),
        ({"keys": [b"s3cret"]}, {"keys": [HIDDEN.encode()]}),
        ({"many": "s3cret"}, {"many": HIDDEN}),  # not what the schema says: hidden whole
        ({"named": ["s3cret"]}, {"named": HIDDEN}),
        ({"unknown": 1}, {"unknown": 1}),
        ("s3cret", HIDDEN),
        ({"source": "s3://key:s3cret@bucket/x"}, {"source": f"s3://{HIDDEN}@bucket/x"}),
        ({"source": "https://h/x?sig=s3cret&e=1"}, {"source": f"https://h/x?sig={HIDDEN}&e={HIDDEN}"}),
        ({"source": "bus://artifacts"}, {"source": "bus://artifacts"}),
        ({"args": {"hf_token": "s3cret", "width": 8}}, {"args": {"hf_token": HIDDEN, "width": 8}}),
        ({"args": {"deep": [{"api-key": "s3cret"}]}}, {"args": {"deep": [{"api-key": HIDDEN}]}}),
        ({"said": [[7, -0.5, "s3cret"], [8, 1.0, ""]]}, {"said": [[0, 0.0, HIDDEN], [0, 0.0, ""]]}),
        ({"said": None}, {"said": None}),
        ({"said": {"odd": b"s3cret"}}, {"said": {"odd": HIDDEN.encode()}}),
        ({"args": {"vocab_tokens": "256", "keys": "ab"}}, {"args": {"vocab_tokens": "256", "keys": "ab"}}),
    ],
)
def test_each_mark_wherever_it_stands(body: object, shown: object) -> None:
    assert redact(Outer, body) == shown
    assert "s3cret" not in str(redact(Outer, body))


def test_names_alone_prove_nothing() -> None:
    """A field called `tokens` that nobody marked stays; only maps that users fill are judged by names."""
    body = {"sample_tokens": 128, "token": "not marked here"}
    assert redact(MicrobatchClaim, body) is body


def test_which_messages_hold_secrets() -> None:
    marked = {name for name, cls in MESSAGE_TYPES.items() if "token" in masks_of(cls)}
    assert {"signal.access", "door.request"} <= marked
    for name, cls in MESSAGE_TYPES.items():
        for field, declared in cls.model_fields.items():
            bearing = field in ("token", "password", "secret", "credentials")
            assert not bearing or SECRET in declared.metadata, f"{name}.{field} must be marked Secret"
    assert masks_of(MicrobatchClaim) == {}
    assert masks_of(LogLine)


def test_marked_fields_stay_out_of_reprs_and_redacted_bodies_still_fit() -> None:
    request = AccessRequest(token="s3cret", action="job.read", resource="j", gateway="a")
    assert "s3cret" not in repr(request)
    assert AccessRequest.model_validate(redact(AccessRequest, request.model_dump())).token == HIDDEN
    job = spec(
        model={"factory": "m:f", "args": {"token": "s3cret"}},
        data={"source": "s3://k:s3cret@b/d"},
        artifacts="s3://k:s3cret@b/a",
    )
    door = DoorRequest(token="s3cret", action="job.submit", spec=job)
    assert "s3cret" not in str(redact(DoorRequest, door.model_dump()))
    assert masks_of(JobRecord)


def test_nothing_of_a_request_to_a_service_or_of_its_answer_is_left() -> None:
    bind = {"job": "j", "session": 1, "generation": "g", "writer": "w", "fence": 1, "attempt": 0, "path": ()}
    token = GeneratedToken(
        session=1,
        fence=1,
        position=2,
        token=7777,
        logprob=-7.777,
        likeliest=((7777, -7.777),),
        digest="okapi",
    )
    tensor = NamedTensor(name="x", dtype="uint8", shape=(5,), data=b"okapi")
    member = Member.of("s", "i")
    named = {"service": "s", "version": "v", "job": "j", "user": "ruth", "writer": "w", "session": 1}
    for message in (
        Generation(id="g", prompt=(7777,), stop=("okapi",), most_tokens=1, **named),
        BindSession(tokens=(7777,), prompt_tokens=1, most_tokens=1, sampling=Sampling(), **bind),
        SessionBound(session=1, outcome="bound", tokens=(7777,)),
        WaveTokens(job="j", member=member, wave=1, tokens=(token,)),
        Predict(
            job="j",
            generation="g",
            path=(),
            inputs=(tensor,),
            others=(PredictItem(generation="h", inputs=(tensor,)),),
        ),
        Predicted(
            generation="g",
            outputs=(tensor,),
            others=(PredictedItem(generation="h", outputs=(tensor,)),),
        ),
    ):
        shown = redact(type(message), message.model_dump())
        assert type(message).model_validate(shown)
        assert not any(part in repr(shown) for part in ("7777", "7.777", "okapi")), shown


def test_what_a_message_is_about_is_marked_as_well() -> None:
    decision = PolicyDecision(module="m", version="1", job="j", suggestion="e-7", adopted=True, reason="r")
    assert references(PolicyDecision, decision) == ["e-7"]
    assert references(Outer, Outer()) == []
