"""The soak of upgrades: what it needs of this machine, without a mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak_upgrade import Software, kill, pids_of

PARENT = (
    "import subprocess, sys; from pathlib import Path; from dmsc.state.state_folder import StateFolder\n"
    "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    "with StateFolder(Path(sys.argv[1])).hold(): print(child.pid, flush=True); input()"
)


def test_a_kill_takes_the_supervisor_and_its_children_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = pids_of(tmp_path)
        assert {parent.pid, child} <= set(found)
        assert os.getpid() not in found
        kill(tmp_path)
        assert parent.wait() == -9
        assert pids_of(tmp_path) == ()  # the lock's file has stayed, and its number may be somebody else's


def test_a_command_that_fails_is_said_with_its_words(tmp_path: Path) -> None:
    software = Software(root=tmp_path, state=tmp_path / "state")
    with pytest.raises(SystemExit, match="exit code 1\nno room"):
        software.python("-c", "raise SystemExit('no room')")
