"""The matrix of who may do what: how it compares what is kept, and when it has tried too little."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.access_matrix.__main__ import LEAST_WIDENED, too_little
from benchmarks.access_matrix.widened import MUTANTS
from benchmarks.access_matrix.wire import Heard
from benchmarks.access_matrix.world import StreamPrint, _digest

BEFORE = StreamPrint("{}", 2, 20, 1, 2, 0, 1, "then", {1: ("$KV.jobs.j", "aa"), 2: ("$KV.jobs.k", "bb")})


def stored(number: int, body: bytes, *more: str) -> Heard:
    lines = ["NATS/1.0", "Nats-Subject: $KV.jobs.j", f"Nats-Sequence: {number}", *more, "", ""]
    return Heard("_INBOX.auditor.1", "", body, "\r\n".join(lines).encode())


def test_what_is_gone_or_changed_is_named_where_all_counts_are_the_same() -> None:
    changed = replace(BEFORE, contents={1: ("$KV.jobs.j", "aa"), 2: ("$KV.jobs.k", "xx")})
    assert changed == BEFORE
    assert BEFORE.lost(changed) == ["$KV.jobs.k"]
    assert BEFORE.lost(replace(BEFORE, contents={2: ("$KV.jobs.k", "bb")})) == ["$KV.jobs.j"]
    grown = {**BEFORE.contents, 3: ("$KV.jobs.j", "cc")}
    assert BEFORE.lost(replace(BEFORE, contents=grown)) == []


def test_a_stream_that_was_made_anew_with_as_much_in_it_is_another() -> None:
    assert BEFORE.differences(replace(BEFORE, created="now")) == "it was removed and made anew"
    assert replace(BEFORE, created="now") != BEFORE


def test_a_digest_is_of_headers_and_body_and_not_of_the_reading() -> None:
    number, subject, digest = _digest(stored(7, b"body", "Nats-Num-Pending: 3", "KV-Operation: PUT"))
    assert (number, subject, len(digest)) == (7, "$KV.jobs.j", 64)
    assert digest == _digest(stored(7, b"body", "Nats-Num-Pending: 9", "KV-Operation: PUT"))[2]
    assert digest != _digest(stored(7, b"bodY", "Nats-Num-Pending: 3", "KV-Operation: PUT"))[2]
    assert digest != _digest(stored(7, b"body", "Nats-Num-Pending: 3", "KV-Operation: DEL"))[2]


def test_too_little_is_said() -> None:
    assert too_little(5_000, 20) == too_little(5_000, None) == []
    assert too_little(4_999, None) == ["fewer than 5,000 probes"]
    assert too_little(4_999, 19) == ["fewer than 5,000 probes", "fewer than 20 widened lists"]


def test_enough_lists_are_widened_and_each_is_another() -> None:
    assert len({mutant.title for mutant in MUTANTS}) == len(MUTANTS) >= LEAST_WIDENED
