"""`scripts/bootstrap.py`: when it acts, and that two of them wait for one another."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import PATIENCE_S
from tests.script_module import script_module

HOLD = """
import fcntl, sys
handle = open(sys.argv[1], "a")
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    return script_module("bootstrap")


def test_the_stamp_says_when_nothing_is_to_be_done(bootstrap: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "a clone with spaces"
    root.mkdir()
    (root / "pyproject.toml").write_text("[project]\n")
    wanted = bootstrap.fingerprint(root)
    stamp = root / "stamp"
    assert not bootstrap.is_current(stamp, wanted, dev=False)
    stamp.write_text(json.dumps({"fingerprint": wanted, "dev": False}))
    assert bootstrap.is_current(stamp, wanted, dev=False)
    assert not bootstrap.is_current(stamp, wanted, dev=True)
    stamp.write_text(json.dumps({"fingerprint": wanted, "dev": True}))
    assert bootstrap.is_current(stamp, wanted, dev=False)
    assert bootstrap.is_current(stamp, wanted, dev=True)


def test_new_dependencies_and_a_moved_clone_are_noticed(bootstrap: ModuleType, tmp_path: Path) -> None:
    prints = set()
    for name, content in (("here", "a"), ("here", "b"), ("there", "b")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "pyproject.toml").write_text(content)
        prints.add(bootstrap.fingerprint(tmp_path / name))
    assert len(prints) == 3


@pytest.mark.parametrize("content", ["", "{", '{"fingerprint": 1}'])
def test_a_stamp_that_was_cut_off_counts_as_none(bootstrap: ModuleType, tmp_path: Path, content: str) -> None:
    stamp = tmp_path / "stamp"
    stamp.write_text(content)
    assert not bootstrap.is_current(stamp, "x", dev=False)


def test_a_half_made_environment_is_not_used(bootstrap: ModuleType, tmp_path: Path) -> None:
    assert not bootstrap.is_usable(tmp_path / ".venv")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    assert not bootstrap.is_usable(tmp_path / ".venv")


def test_a_second_run_waits_for_the_first_and_says_so(bootstrap: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock with spaces"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"

        class Release(io.StringIO):
            """Lets the first run go as soon as the second has said that it waits."""

            def flush(self) -> None:
                assert first.stdin is not None
                if not first.stdin.closed:
                    first.stdin.close()

        say = Release()
        with bootstrap.locked(lock, say):
            assert "waiting" in say.getvalue()
            assert first.wait(timeout=PATIENCE_S) == 0
