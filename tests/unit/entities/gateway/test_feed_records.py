"""Pushed records: what is taken, and the one line about what is not."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from entities.gateway.feeds.feed_records import read_push
from schemas.errors import BadInput
from schemas.feeds import PIECE_BYTES, FeedField, FeedSpec, records_needed, standing

FIELDS = FeedSpec.model_validate(
    {"fields": {"inputs": "float32[2,2]", "label": "uint8", "note": "text"}}
).fields
GOOD = {"inputs": [[1, 2.5], [0, -3e38]], "label": 255, "note": "grün"}


def push(*records: object) -> bytes:
    return "\n".join(json.dumps(record) for record in records).encode()


def test_lines_and_arrays_are_kept_alike_in_the_order_of_the_fields() -> None:
    turned = dict(reversed(GOOD.items()))
    (lines,) = read_push(push(GOOD, turned) + b"\n\n", FIELDS)
    (array,) = read_push(json.dumps([GOOD, turned], indent=2).encode(), FIELDS)
    assert lines == array
    assert lines.records == 2
    first, second = lines.data.splitlines()
    assert first == second
    assert json.loads(first) == GOOD
    assert [*json.loads(first)] == [*FIELDS]


def test_pieces_hold_whole_records() -> None:
    fields = {"note": FeedField(dtype="text")}
    pieces = read_push(push(*({"note": "x" * 200_000} for _ in range(5))), fields)
    assert [piece.records for piece in pieces] == [2, 2, 1]
    assert all(len(piece.data) <= PIECE_BYTES for piece in pieces)
    assert len({piece.described().digest for piece in pieces}) == 2


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "the push has no records"),
        (b"[]", "the push has no records"),
        (b"{", r"record 0 \(line 1\) is no JSON .* give each record in a line of its own"),
        (push(GOOD) + b"\n\n{bad}", r"record 1 \(line 3\) is no JSON"),
        (b"{}{}", "curl keeps line breaks with --data-binary only"),
        (b'"\xff"', r"record 0 \(line 1\): byte 1 is not UTF-8"),
        (b"[" * 100_000, "the push is no JSON that is taken: it is nested too deeply"),
        (b"[" + b"9" * 5_000 + b"]", "taken: it has a whole number with too many digits$"),
        (b'{"label": 1, "label": 2}', r"record 0 \(line 1\) is no JSON that is taken: it has 'label' twice"),
        (push([1]), "the push|record 0 is a number"),
        (push(GOOD, 7), r"record 1 \(line 2\) is a number, not an object with inputs, label, note"),
        (push({"label": 1}), "record 0 .* has no field inputs; the feed's records have inputs, label, note"),
        (push({**GOOD, "more": 1}), "field 'more' is not in the feed, which has inputs"),
        (push({**GOOD, "label": 256}), r"record 0 \(line 1\), field label: needs uint8, and has 256"),
        (push({**GOOD, "label": 1.0}), "needs uint8, and has 1.0, which is no whole number"),
        (push({**GOOD, "label": True}), "needs uint8, and has true or false"),
        (push({**GOOD, "note": 3}), "field note: needs a text, and has a number"),
        (push({**GOOD, "note": "\ud800"}), "half of a surrogate pair"),
        (push({**GOOD, "inputs": [1, 2]}), r"needs float32\[2,2\], and dimension 1 is no list"),
        (push({**GOOD, "inputs": [[1, 2]]}), "dimension 0 has 1 values"),
        (push({**GOOD, "inputs": [[1, 2], [3]]}), "dimension 1 has 1 values"),
        (push({**GOOD, "inputs": [[1, 2], [3, 4e38]]}), "has 4e.38, which it does not hold"),
        (push({**GOOD, "inputs": [[1, 2], [3, None]]}), "has null"),
        (push({**GOOD, "inputs": [[1, 2], [3, "4"]]}), "has a text"),
        (b'{"inputs": [[1, 2], [3, NaN]], "label": 1, "note": ""}', "NaN is no number of JSON"),
        (b'{"inputs": [[1, 2], [3, 1e999]], "label": 1, "note": ""}', "inf, which it does not hold"),
        (push({**GOOD, "note": "x" * PIECE_BYTES}), "bytes, at most 524,288"),
    ],
)
def test_a_push_with_a_bad_record_is_refused_with_its_place(body: bytes, line: str) -> None:
    with pytest.raises(BadInput, match=line) as refused:
        read_push(body, FIELDS)
    assert "\n" not in refused.value.text
    assert len(refused.value.text) < 300


@pytest.mark.parametrize(
    "kind", ["floaty", "float32[", "float32[0]", "text[3]", "int64[2000000]", "x" * 9999, 7]
)
def test_a_field_that_is_none(kind: object) -> None:
    with pytest.raises(ValidationError):
        FeedSpec.model_validate({"fields": {"inputs": kind}})


def test_fields_are_written_as_they_are_read() -> None:
    for text in ("text", "int64", "float32[3,32,32]"):
        assert str(FeedField.model_validate(text)) == text


def test_what_a_job_waits_for() -> None:
    assert [records_needed(position, 8) for position in (1, 8, 9)] == [8, 8, 16]
    open_feed = [standing(16, 0, count, closed=False, stops=True) for count in (0, 15, 16, 99)]
    assert open_feed == ["waits", "waits", "there", "there"]
    assert standing(12, 8, 15, closed=False, stops=True) == "waits"
    assert standing(12, 8, 15, closed=True, stops=True) == "there"
    assert standing(16, 0, 15, closed=True, stops=True) == "over"
    assert standing(16, 0, 15, closed=True, stops=False) == "there"
    assert standing(16, 0, 0, closed=True, stops=False) == "over"
