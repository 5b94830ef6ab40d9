"""The line at the end of a run: CPU seconds by file, of all processes that a file's tests have started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.cpu_by_file import MachineTime, ProcessTable, line

WORK = "import sys, time\nwhile time.process_time() < 0.3:\n    pass\nprint('done', flush=True)\n"
WAITING = f"{WORK}sys.stdin.read()\n"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])\nsys.stdin.read()\n"

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/stat"), reason="there is no table of processes"
)


def begun(*command: str) -> subprocess.Popen[str]:
    """A process that has worked and waits for the end of its standard input."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    return process


def test_processes_count_while_they_live_and_when_they_are_gone() -> None:
    table = ProcessTable(os.getpid())
    before = table.seconds()
    process = begun(sys.executable, "-c", WAITING)
    living = table.seconds()
    process.communicate()
    assert living - before >= 0.25
    assert table.seconds() >= living


def test_what_a_child_has_waited_for_counts() -> None:
    table = ProcessTable(os.getpid())
    before = table.seconds()
    process = begun(sys.executable, "-c", PARENT)
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    assert table.seconds() - before >= 0.25


def test_a_fork_server_belongs_to_the_agent_that_it_names() -> None:
    words = ("workers.process.fork_server", "--agent", str(os.getpid()))
    process = begun(sys.executable, "-c", WAITING, *words)
    stranger = ProcessTable(process.pid)
    mine = ProcessTable(os.getpid())
    assert stranger.seconds() < mine.seconds()
    assert process.pid in mine._own
    process.communicate()


def test_the_most_expensive_file_comes_first() -> None:
    machine = MachineTime(1000.0, 300.0).until(MachineTime(1020.0, 305.0))
    assert line(Counter({"a.py": 1.2, "b.py": 7.0, "c.py": 0.1}), 8.3, machine) == (
        "CPU seconds: 8 in all, of 20 that the cores had, 25% idle; b.py 7, a.py 1"
    )
