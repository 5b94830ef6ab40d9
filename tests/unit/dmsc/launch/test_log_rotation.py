"""Log files stay bounded while somebody writes into them; open files are as many as the system allows."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dmsc.launch.log_rotation import KEPT, rotate, rotating

SHOW_LIMIT = """
import resource, sys
sys.argv = ["dmsc", "version"]
from dmsc.cli import main
try: main()
except SystemExit: pass
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_file_that_is_too_long_is_begun_anew_under_its_writers_hands(tmp_path: Path) -> None:
    path, small = tmp_path / "agent-a.log", tmp_path / "small.log"
    small.write_text("few words")
    with path.open("ab", buffering=0) as writer:
        for part in (b"first ", b"second ", b"third ", b"fourth "):
            writer.write(part * 20)
            assert rotate(tmp_path, most_bytes=100) == [path]
            assert rotate(tmp_path, most_bytes=100) == []
        writer.write(b"now")
    assert path.read_bytes() == b"now"  # no gap: it appends
    found = {file.name: file.read_bytes()[:6] for file in tmp_path.glob("agent-a.log.*")}
    assert found == {"agent-a.log.1": b"fourth", "agent-a.log.2": b"third "}
    assert len(found) == KEPT
    assert small.read_text() == "few words"


def test_a_link_is_not_followed_and_keeps_no_other_from_its_turn(tmp_path: Path) -> None:
    secret, logs = tmp_path / "secret", tmp_path / "logs"
    secret.write_bytes(b"x" * 1000)
    logs.mkdir()
    (logs / "a.log").symlink_to(secret)
    (logs / "b.log").write_bytes(b"y" * 1000)
    assert rotate(logs, most_bytes=100) == [logs / "b.log"]
    assert secret.stat().st_size == 1000
    assert not list(logs.glob("a.log.*"))


def test_where_it_can_not_be_copied_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"y" * 1000)
    (tmp_path / "a.log.new").mkdir()  # in the copy's place
    with pytest.raises(OSError, match=r"directory|permitted"):
        rotate(tmp_path, most_bytes=100)
    assert path.stat().st_size == 1000


async def test_it_is_done_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    async with rotating(tmp_path, most_bytes=10, look_s=0.005):
        while "a.log.2" not in os.listdir(tmp_path):
            path.write_bytes(b"y" * 100)
            await asyncio.sleep(0.005)


def test_the_command_may_open_as_many_files_as_the_system_lets_it() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
    done = subprocess.run(
        [sys.executable, "-c", SHOW_LIMIT],
        cwd=Path(__file__).resolve().parents[4],
        env={**os.environ, "PYTHONPATH": "."},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, most)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"{most} {most}"
