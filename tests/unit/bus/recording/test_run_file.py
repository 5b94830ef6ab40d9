"""A run's file holds what was on the bus, byte for byte, and says in one line when it is not whole."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgpack
import pytest

from bus import subjects
from bus.recording import run_file
from bus.recording.run_file import RunFile, check_run
from bus.recording.run_record import RECORDED
from policies.kit.policy import EVENTS
from schemas.errors import BadInput, DamagedRun, DmscError, NotFound
from schemas.telemetry import InstanceSample
from tests.builders import recorded_runs


def test_everything_that_a_module_may_take_in_is_recorded() -> None:
    """Draft §4.2: what was seen, suggested and decided is on a stream, and so in a run's record."""
    said = {subjects.SUGGESTION, subjects.POLICY_DECISION, subjects.POLICY_SCORE, subjects.POLICY_SWITCH}
    assert {*EVENTS.values(), *said} <= set(RECORDED)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j.dmscrun"
    content = recorded_runs.frames()
    written = recorded_runs.write(path, content)
    with RunFile.open(path) as run:
        assert run.header == written
        assert list(run.frames()) == content
    assert (written.job, written.name, written.steps, written.ended) == ("j", "uneven", 60, True)
    assert written.count == len(content)
    assert (written.began, written.until) == pytest.approx((recorded_runs.BEGAN, recorded_runs.BEGAN + 60))
    assert list(tmp_path.iterdir()) == [path]
    message, envelope = content[3].open()
    assert isinstance(message, InstanceSample)
    assert envelope.sender.name == "someone"


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    content = recorded_runs.frames()
    for name in ("one", "two"):
        recorded_runs.write(tmp_path / name, content)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_nothing_recorded_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing is recorded of a job j"):
        recorded_runs.write(tmp_path / "j.dmscrun", [])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_off_says_so_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "j.dmscrun"
    recorded_runs.write(path)
    whole = path.read_bytes()
    for kept in (*range(0, 40, 7), len(whole) // 3, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(DamagedRun) as caught:
            check_run(path)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{path}: ")


def test_a_file_without_its_last_frames_says_how_many_there_are(tmp_path: Path) -> None:
    path = tmp_path / "j.dmscrun"
    recorded_runs.write(path)
    with gzip.open(path) as unzipped:
        values = list(msgpack.Unpacker(unzipped))
    path.write_bytes(gzip.compress(b"".join(map(msgpack.packb, values[:-5]))))
    with pytest.raises(DamagedRun, match=r"cut off: \d+ of \d+ messages"):
        check_run(path)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "j.dmscrun"
    recorded_runs.write(path)
    with gzip.open(path) as unzipped:
        values = list(msgpack.Unpacker(unzipped))
    values[1][3] = values[1][3].replace(b"east", b"west")
    path.write_bytes(gzip.compress(b"".join(map(msgpack.packb, values))))
    with pytest.raises(DamagedRun, match="SHA-256"):
        check_run(path)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"", DamagedRun, "no run's file"),
        (b"name,age\n", DamagedRun, "no run's file"),
        (gzip.compress(b"hello"), DamagedRun, "no run's file"),
        (gzip.compress(msgpack.packb({"format": "dmsc-run", "version": 1})), DamagedRun, "its header lacks"),
        (
            gzip.compress(msgpack.packb({"format": "dmsc-run", "version": 9})),
            BadInput,
            "format 9; this version",
        ),
    ],
    ids=["empty", "text", "no msgpack", "no header", "later format"],
)
def test_what_is_no_run_is_one_clear_line(
    tmp_path: Path, content: bytes, error: type[DmscError], text: str
) -> None:
    path = tmp_path / "x.dmscrun"
    path.write_bytes(content)
    with pytest.raises(error, match=text):
        check_run(path)
    with pytest.raises(BadInput, match="No such file"):
        check_run(tmp_path / "none.dmscrun")


def test_rows_of_another_version_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.dmscrun"
    recorded_runs.write(path)
    monkeypatch.setattr(
        run_file.subjects,
        "SUBJECTS",
        [row for row in subjects.SUBJECTS if row is not subjects.INSTANCE_SAMPLE],
    )
    with RunFile.open(path) as run:
        found = list(run.frames())
    assert len(found) == sum(one.row is not subjects.INSTANCE_SAMPLE for one in recorded_runs.frames())
