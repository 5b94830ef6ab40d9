"""Lines of a batch's file: units that begin where they are said to, and what is wrong with a line."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from entities.gateway.batches.batch_lines import (
    BatchScan,
    answered_line,
    request_of,
    requests_in,
    unread_line,
)
from entities.gateway.calls.failures import openai_failure
from entities.gateway.calls.json_bounds import MOST_ELEMENTS, MOST_LISTS
from schemas.errors import BadInput
from schemas.services.batches import MOST_LINE_BYTES, UNIT_LINES

PATH = "/v1/completions"


def line(custom_id: str, **body: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": PATH, "body": {"model": "m", **body}}
    return json.dumps(whole).encode()


def scanned(data: bytes, sizes: random.Random | None = None) -> BatchScan:
    scan = BatchScan(PATH)
    while data:
        size = len(data) if sizes is None else sizes.randint(1, 300)
        scan.add(data[:size])
        data = data[size:]
    scan.end()
    return scan


@pytest.mark.parametrize("ends", [b"", b"\n", b"\n\n  \n"])
@pytest.mark.parametrize("count", [1, UNIT_LINES, UNIT_LINES + 1, 3 * UNIT_LINES - 1])
def test_units_are_cut_where_their_requests_begin_however_the_bytes_come(count: int, ends: bytes) -> None:
    lines = [line(f"id-{number}", prompt="é" * (number % 7)) for number in range(count)]
    gaps = random.Random(count)
    data = b"\n".join(each + b"\n" * gaps.randint(0, 2) for each in lines) + ends
    whole, pieces = scanned(data), scanned(data, random.Random(1))
    assert (whole.offsets, whole.firsts, whole.lines) == (pieces.offsets, pieces.firsts, pieces.lines)
    assert whole.firsts == [*range(0, count, UNIT_LINES)]
    assert (whole.lines, whole.offsets[-1], [*whole.models]) == (count, len(data), ["m"])
    units = [
        requests_in(data[begin:end]) for begin, end in zip(whole.offsets, whole.offsets[1:], strict=False)
    ]
    assert [each for unit in units for each in unit] == lines
    assert all(len(unit) == UNIT_LINES for unit in units[:-1])


def test_a_unit_of_large_requests_has_fewer() -> None:
    large = line("0", prompt="x" * (3 << 20))
    data = b"\n".join([large.replace(b'"0"', b'"%d"' % number) for number in range(7)])
    scan = scanned(data)
    assert scan.firsts == [0, 5]
    assert scan.offsets == [0, 5 * (len(large) + 1), len(data)]


def test_a_model_that_is_null_is_none() -> None:
    asked = line("a", model=None)
    assert [*scanned(asked).models] == [""]
    request = request_of(asked, 0, PATH, "m")
    assert (request.model, json.loads(request.text)["model"]) == ("m", "m")


def test_a_line_that_is_no_request_is_one_all_the_same() -> None:
    data = b"\n".join([line("a"), b"{no json", b"[1]", line("b")])
    assert scanned(data).lines == 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no request"),
        (b"\n \n", "no request"),
        (b"\n".join([line("a"), line("b"), line("a")]), "requests 1 and 3 have one custom_id, 'a'"),
        (b"x" * (MOST_LINE_BYTES + 1), "request 1 has more than"),
        (line("a") + b"\n" + b" " * (MOST_LINE_BYTES + 1), "request 2 has more than"),
    ],
)
def test_a_file_that_is_none_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        scanned(data, None)


def test_a_request_may_be_a_body_alone() -> None:
    request = request_of(b'{"prompt": "abc"}', 6, PATH, "m@v2")
    assert (request.custom_id, request.model, request.user) == ("request-7", "m@v2", None)
    assert json.loads(request.text) == {"prompt": "abc", "model": "m@v2"}
    named = request_of(b'{"custom_id": "x", "prompt": "abc", "model": "other"}', 6, PATH, "m")
    assert (named.custom_id, json.loads(named.text)) == ("x", {"prompt": "abc", "model": "other"})
    assert request_of(line("a"), 0, PATH, "") == request_of(line("a") + b" ", 0, PATH, "")
    assert request_of(line("a"), 0, PATH, "").key != request_of(line("a"), 1, PATH, "").key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "request 3 is no JSON"),
        (b"7", "request 3 is no JSON object"),
        (b'{"custom_id": "a", "body": 1}', "body is no object"),
        (b'{"custom_id": "a", "body": {}, "url": "/v1/predict"}', "/v1/predict"),
        (b'{"custom_id": "a", "body": {}, "method": "GET"}', "POST"),
        (b'{"custom_id": 7, "body": {}}', "custom_id has to be a text"),
        (b'{"custom_id": "a", "body": {}, "more": 1}', "unknown key 'more'"),
        (b'{"custom_id": "\\ud800", "body": {}}', "half a character"),
        (json.dumps({"custom_id": "a" * 300, "body": {}}).encode(), "200 characters"),
        (b"[" * 100_000, "no JSON"),
        (b"[" * (MOST_LISTS + 1), "more than 262,144 lists"),
        (b'{"custom_id":"a","body":{"x":[' + b"1," * MOST_ELEMENTS + b"1]}}", "more than 2,097,152 values"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(text: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        request_of(text, 2, PATH, "m")
    told = json.loads(unread_line(2, caught.value))
    assert words in told["error"]["message"]
    assert told["response"] is None
    is_read = b'"a"' in text and len(text) < 1_000
    assert told["custom_id"] == ("a" * 200 if b"aaa" in text else "a" if is_read else "request-3")


def test_an_answer_is_one_line() -> None:
    told = answered_line("k", "id", 200, {"text": "a\nb\u2028é"})
    assert told.count(b"\n") == 1
    assert json.loads(told)["response"] == {
        "status_code": 200,
        "request_id": "req_k",
        "body": {"text": "a\nb\u2028é"},
    }


def test_half_a_character_of_a_request_costs_nobody_the_answers() -> None:
    told = answered_line("k", "id", *openai_failure(BadInput("unknown \ud800", param="\ud800")))
    assert json.loads(told)["response"]["body"]["error"]["message"] == "unknown ?"
