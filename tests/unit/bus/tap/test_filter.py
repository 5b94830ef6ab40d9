"""`field=value` on any field of envelope, subject or body."""

from __future__ import annotations

import pytest

from bus import subjects
from bus.tap.filter import Filter
from bus.tap.message import TappedMessage, decode
from bus.wire import codec
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadInput
from schemas.policy import SetWeights
from schemas.signals import AccessRequest
from tests.builders.policies import suggestion
from tests.builders.steps import claim

SENDER = codec.sender_map(Sender(name="gateway-a", kind=EntityKind.GATEWAY, incarnation="g1"))


def tapped(row, message, **tokens) -> TappedMessage:
    return decode(row(**tokens), codec.encode(message, SENDER, "e-1", "cause-7"), at=1.0)


CLAIM = tapped(
    subjects.STEP_CLAIM,
    claim(2, "j-s1-r0", stage=1, upstream="j-s0-r1", loss=2.5),
    job="j",
    sid="j-s1-r0",
)
WEIGHTS = suggestion(SetWeights(stage=0, weights={"a": 1.0}))
SUGGESTION = tapped(subjects.SUGGESTION, WEIGHTS, owner="system", module="m")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("step=3", True),
        ("step=4", False),
        ("step!=4", True),
        ("step>2", True),
        ("step>=4", False),
        ("loss<2.6", True),
        ("body.microbatch=2", True),
        ("owner.sid=j-s1-*", True),
        ("owner.sid!=j-s1-r0", False),
        ("sender.name=gateway-a", True),
        ("sender.kind=gateway", True),
        ("causation=cause-7", True),
        ("type=step.claim", True),
        ("sid=j-s1-r0", True),
        ("row=step claim", True),
        ("subject=*.claim.*", True),
        ("evaluate=false", True),
        ("evaluate=true", False),
        ("loss=2.50", True),
        ("owner.nothing=1", False),
        ("owner.nothing!=1", False),
    ],
)
def test_a_claim_is_found_by_its_fields(expression, expected):
    condition = Filter.parse(expression)
    condition.check([subjects.STEP_CLAIM])
    assert condition.meets(CLAIM.tree()) is expected


def test_fields_inside_maps_and_lists():
    assert Filter.parse("action.weights.a=1").meets(SUGGESTION.tree())
    assert Filter.parse("action.action=set_weights").meets(SUGGESTION.tree())
    tree = {"body": {"entries": [{"sid": "a"}, {"sid": "b"}], "microbatches": [1, 5]}}
    assert Filter.parse("entries.sid=b").meets(tree)
    assert not Filter.parse("entries.0.sid=b").meets(tree)
    assert Filter.parse("microbatches=5").meets(tree)
    assert Filter.parse("microbatches!=6").meets(tree)


@pytest.mark.parametrize("text", ["", "step", "=3", "3=4", "step>abc", "loss<="])
def test_what_is_no_filter_is_said_in_one_line(text):
    with pytest.raises(BadInput, match=r"is not a filter|needs a number"):
        Filter.parse(text)


def test_a_field_that_nothing_has_is_named_with_close_ones():
    with pytest.raises(BadInput, match=r"no message here has a field 'stpe'; close ones: .*step"):
        Filter.parse("stpe=3").check([subjects.STEP_CLAIM])


def test_bearer_tokens_can_be_neither_read_nor_guessed():
    request = AccessRequest(token="s3cret", action="job.read", resource="j", gateway="a")
    seen = tapped(subjects.ACCESS, request, gateway="a")
    assert "s3cret" not in str(seen.tree())
    assert not Filter.parse("token=s3cret").meets(seen.tree())
