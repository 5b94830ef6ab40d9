"""Lines of a pipe are pushed as they come, in batches of what is there."""

from __future__ import annotations

import io
import os

from dmsc.commands.data.record_lines import RecordLines


def test_a_file_is_cut_into_whole_lines() -> None:
    lines = [b"%d" % number * 10 for number in range(100, 160)]
    text = b"\n".join(lines)
    batches = []
    with RecordLines(io.BytesIO(text + b"\n\n"), most_bytes=100) as source:
        while batch := source.take():
            assert len(batch) <= 100
            batches.append(batch)
        assert source.take() == b""
    assert b"".join(batches) == text + b"\n"


def test_a_longer_line_is_a_batch_of_its_own() -> None:
    with RecordLines(io.BytesIO(b"a\n" + b"b" * 50 + b"\nc"), most_bytes=10) as source:
        found = [source.take() for _ in range(4)]
    assert b"".join(found) == b"a\n" + b"b" * 50 + b"\nc\n"
    assert b"b" * 50 + b"\n" in found


def test_what_has_come_through_a_pipe_does_not_wait_for_more() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, RecordLines(pipe) as source:
        with os.fdopen(writing, "wb", buffering=0) as end:
            end.write(b"one\n")
            assert source.take() == b"one\n"
            end.write(b"two\n")
            assert source.take() == b"two\n"
        assert source.take() == b""
