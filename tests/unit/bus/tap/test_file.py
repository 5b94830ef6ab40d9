"""Recordings: the same messages again, without their secrets; damage is told behind what is whole."""

from __future__ import annotations

import gzip
import stat
from pathlib import Path

import msgpack
import pytest

from bus import subjects
from bus.tap.file import TapRecorder, read_tap
from bus.tap.message import RawMessage, decode
from bus.wire import codec
from schemas.errors import Ack, BadInput, DamagedRun
from schemas.signals import AccessRequest
from schemas.telemetry import DeadLetter, LogLine
from tests.builders import recorded_runs
from tests.builders.tapped_messages import SENDER, answer, arrived, look

ACCESS = AccessRequest(token="s3cret", action="job.read", resource="j", gateway="a")
KEY = subjects.ROUTE_TABLE(job="j", cluster="east", stage=0)
SEEN = [
    arrived(subjects.LOG, LogLine(level="info", event="hello"), "e-1", at=1.25, sid="x"),
    arrived(subjects.ACCESS, ACCESS, "e-2", at=2.0, gateway="a"),
    answer(Ack(note="yes"), "e-3", "e-2", at=2.5),
    RawMessage(3.0, KEY, b"", "MaxAge"),
    RawMessage(4.0, "some.thing.else", b"\xff\x00not ours"),
    RawMessage(5.0, subjects.ACCESS(gateway="a"), codec.encode(ACCESS, SENDER, "e-4")[:-9]),
]


def record(path: Path, seen: list[RawMessage] = SEEN) -> None:
    with TapRecorder(path) as recorder:
        for one in seen:
            recorder.add(look(one))


def test_what_was_recorded_is_read_again_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "x.dmsctap"
    record(path)
    found = list(read_tap(path))
    assert [(one.at, one.subject, one.operation) for one in found] == [
        (one.at, one.subject, one.operation) for one in SEEN
    ]
    assert [look(one).message for one in found[:1]] == [LogLine(level="info", event="hello")]
    assert found[4].data == SEEN[4].data
    assert look(found[1]).message == ACCESS.model_copy(update={"token": "***"})
    assert look(found[3]).note == "expired"
    with gzip.open(path) as unzipped:
        assert b"s3cret" not in unzipped.read()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.dmsctap"
    record(path)
    with pytest.raises(BadInput, match="exists already; name another file"):
        record(path)
    with pytest.raises(BadInput, match="No such file"), TapRecorder(tmp_path / "no" / "x"):
        pass


def read_until_damage(path: Path) -> tuple[list[RawMessage], str]:
    """What is whole, and then the one line."""
    found: list[RawMessage] = []
    try:
        for one in read_tap(path):
            found.append(one)
    except DamagedRun as error:
        text = str(error)
    else:
        raise AssertionError("no damage was found")
    assert "\n" not in text
    return found, text


def test_wherever_it_is_cut_what_is_whole_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "x.dmsctap"
    with TapRecorder(path) as recorder:
        for one in SEEN:
            recorder.add(look(one))
            recorder.close_off()
    whole = path.read_bytes()
    counts = []
    for kept in range(len(whole) - 12, 40, -25):
        path.write_bytes(whole[:kept])
        found, text = read_until_damage(path)
        assert [one.at for one in found] == [one.at for one in SEEN[: len(found)]]
        assert text.startswith(f"{path}: ")
        counts.append(len(found))
    assert counts[0] == len(SEEN)
    assert counts == sorted(counts, reverse=True)
    assert set(counts) >= {0, 2, 4, 6}


def test_a_recording_whose_tap_was_killed_has_all_that_was_closed_off(tmp_path: Path) -> None:
    path, copy = tmp_path / "x.dmsctap", tmp_path / "killed"
    with TapRecorder(path) as recorder:
        for one in SEEN[:2]:
            recorder.add(look(one))
        recorder.close_off()
        copy.write_bytes(path.read_bytes())
    found, text = read_until_damage(copy)
    assert len(found) == 2
    assert "cut off or damaged: the first 2 messages are whole" in text


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.dmsctap"
    record(path)
    with gzip.open(path) as unzipped:
        values = list(msgpack.Unpacker(unzipped))
    values[1][3] = values[1][3].replace(b"hello", b"hullo")
    path.write_bytes(gzip.compress(b"".join(map(msgpack.packb, values))))
    assert "SHA-256" in read_until_damage(path)[1]
    path.write_bytes(gzip.compress(b"".join(map(msgpack.packb, [*values[:3], values[-1]]))))
    assert "cut off: the first 2 of 6 messages are whole" in read_until_damage(path)[1]
    path.write_bytes(gzip.compress(b"".join(map(msgpack.packb, [values[0], values[1], 7]))))
    assert "message 2 is not one" in read_until_damage(path)[1]


def test_a_runs_file_is_a_recording_too(tmp_path: Path) -> None:
    path = tmp_path / "j.dmscrun"
    recorded_runs.write(path)
    found = list(read_tap(path))
    assert [one.subject for one in found] == [frame.subject for frame in recorded_runs.frames()]
    assert decode(found[0].subject, found[0].data, at=0.0).problem == ""


def test_other_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"name,age\n")
    assert read_until_damage(path)[0] == []
    path.write_bytes(gzip.compress(msgpack.packb({"format": "other"})))
    assert "no recording" in read_until_damage(path)[1]
    path.write_bytes(gzip.compress(msgpack.packb({"format": "dmsc-tap", "version": 9})))
    with pytest.raises(BadInput, match="format 9; this version"):
        list(read_tap(path))
    with pytest.raises(BadInput, match="No such file"):
        list(read_tap(tmp_path / "none"))


def test_a_dead_letter_gives_nothing_away() -> None:
    head = codec.encode(ACCESS, SENDER, "e-9")
    for cut in (len(head), len(head) - 5):
        letter = DeadLetter(
            service="s", subject=subjects.ACCESS(gateway="a"), reason="r", size=9, head=head[:cut]
        )
        tapped = look(arrived(subjects.DEAD_LETTER, letter, "e", sid="s"))
        assert isinstance(tapped.message, DeadLetter)
        assert b"s3cret" not in tapped.raw
        assert b"***" in tapped.message.head


def test_a_token_on_the_wrong_subject_or_in_pieces_gives_nothing_away() -> None:
    data = codec.encode(ACCESS, SENDER, "e-9")
    for subject in (subjects.LOG(sid="x"), "no.such.subject", "_INBOX.a.b"):
        for cut in (len(data), len(data) - 5):
            assert b"s3cret" not in decode(subject, data[:cut], at=0.0).raw
