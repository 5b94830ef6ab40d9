"""A part of `make gpu` that hangs is killed with all that it started, and the others run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from tests.patience import PATIENCE_S


def test_what_a_part_found_is_its_last_line() -> None:
    script = "print('a word of torch'); print('{\"found\": {\"x\": 1}}')"
    assert gpu.last_line_of([sys.executable, "-c", script], 60.0) == {"found": {"x": 1}}
    assert gpu.last_line_of([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == {
        "failed": "exit status 3, and no word of what it found"
    }


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 3600 & echo $$ $! > {pids}; wait"
    with pytest.raises(gpu.Hung, match="killed after 2 s"):
        gpu.last_line_of(["sh", "-c", script], 2.0)
    hung = [int(word) for word in pids.read_text().split()]
    assert len(hung) == 2, "it did not get as far as to hang"
    deadline = time.monotonic() + PATIENCE_S
    while any(lives(pid) for pid in hung):  # the kernel takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_the_others_run_and_know_what_came_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, device: str, *more: str) -> list[str]:
        if name == "hangs":
            return ["sleep", "3600"]
        hashes = {**json.loads(more[1]), name: "aa"}
        return ["echo", json.dumps({"found": {"before": list(hashes)[:-1]}, "hashes": hashes})]

    monkeypatch.setattr(gpu, "part", part)
    parts = gpu.Parts("cpu", 60.0)
    assert parts.take("one", 60.0)
    assert not parts.take("hangs", 0.5)
    assert parts.take("two", 60.0)
    assert parts.found == {
        "one": {"before": []},
        "hangs": "FAILED: killed after 0 s",
        "two": {"before": ["one"]},
    }
    assert parts.failed == ["hangs"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_no_part_begins_when_time_is_over() -> None:
    parts = gpu.Parts("cpu", 0.0)
    assert parts.take("attention", 60.0)
    assert parts.found == {"attention": "left out: no time"}
    assert not parts.failed


def test_all_of_it_stays_under_eight_minutes_whatever_hangs() -> None:
    assert gpu.SECONDS + gpu.LAST_S + gpu.DOWN_S < 480.0
    parts = gpu.Parts("cpu", gpu.SECONDS)
    assert parts.left_s <= gpu.SECONDS + gpu.LAST_S
