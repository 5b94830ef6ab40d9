"""Whatever arrives, `decode` gives a message or says `BadMessage`: nothing else ever comes out of it."""

from __future__ import annotations

import random

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz_messages import Fuzzer
from bus.subjects import SUBJECTS
from bus.wire import codec
from schemas.base import MESSAGE_TYPES, Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage

REASONS = {
    "oversized",
    "malformed",
    "envelope",
    "unknown type",
    "wrong type",
    "wrong version",
    "invalid body",
    "dense",
}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
envelopes = st.fixed_dictionaries(
    {
        "type": st.sampled_from(sorted(MESSAGE_TYPES)) | values,
        "version": st.just([1, 0]) | st.just([1, 99]) | values,
        "id": st.just("i1-1") | values,
        "sender": st.just({"name": "a", "kind": "client", "incarnation": "i1"}) | values,
        "sent_at": st.just(1.0) | values,
        "body": st.dictionaries(st.text(max_size=8), values, max_size=4) | values,
    },
    optional={"causation": values, "correlation": values, "more": values},
)


def check(data: bytes, expected: type[Message] | None = None) -> None:
    codec.peek(data)
    try:
        message, envelope = codec.decode(data, expected)
    except BadMessage as error:
        refusal = error
    else:
        assert isinstance(message, Message)
        assert isinstance(envelope, Envelope)
        assert expected is None or type(message) is expected
        return
    assert refusal.fields["reason"] in REASONS
    assert "\n" not in refusal.text
    assert len(refusal.text) < 2_000


@given(st.binary(max_size=200))
@example(b"\x91" * 5_000)
@example(b"\xdf\xff\xff\xff\xff")
@settings(max_examples=300)
def test_bytes(data: bytes) -> None:
    check(data)


@given(envelopes, st.sampled_from(SUBJECTS))
@settings(max_examples=150)
def test_maps_that_look_like_envelopes(envelope: dict[str, object], row: object) -> None:
    data = msgpack.packb(envelope)
    check(data)
    check(data, row.schema)


@pytest.mark.parametrize("seed", range(2))
def test_every_kind_on_every_row(seed: int) -> None:
    fuzzer = Fuzzer(seed, {})
    kinds = set()
    for row in SUBJECTS:
        for _ in range(15):
            for one in fuzzer.next(row):
                kinds.add(one.kind)
                check(one.data, row.schema)
    assert len(kinds) == 13
    again, other = Fuzzer(seed, {}), Fuzzer(seed, {})
    row = random.Random(seed).choice(SUBJECTS)
    assert [again.next(row) for _ in range(50)] == [other.next(row) for _ in range(50)]
