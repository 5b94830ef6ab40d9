"""CPU seconds by test file, for the line at the end of a run: what the suite's budget is spent on.

A test process looks at the process table every few seconds and at the end of each file. Its own are the
processes below it, and fork servers, which name the node agent that they belong to (ADR-0030). What ended
between two looks is in the account of whoever waited for it; where nobody of ours did, the last look counts.
Linux only: elsewhere there is no line.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LOOK_S = 2.0
"""Seconds between two looks: one costs milliseconds."""
SHOWN = 20
"""Files in the line."""
OUTPUT = "cpu_by_file"
"""Key of a test process's figures in what it hands to the process that started it."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Account:
    """A process: who started it, and ticks of its own and of those that it has waited for."""

    parent: int
    ticks: int


@dataclass
class ProcessTable:
    """CPU seconds of a process and all that it started, dead or alive."""

    root: int
    _own: dict[int, Account] = field(default_factory=dict)
    _ended: int = 0
    _total: int = 0

    def seconds(self) -> float:
        accounts = read_accounts()
        own = self._descendants(accounts)
        for pid, account in self._own.items():
            if pid not in own and account.parent not in self._own:  # nobody of ours has its figures
                self._ended += account.ticks
        self._own = own
        self._total = max(self._total, self._ended + sum(account.ticks for account in own.values()))
        return self._total / _TICKS

    def _descendants(self, accounts: dict[int, Account]) -> dict[int, Account]:
        below: dict[int, list[int]] = {}
        for pid, account in accounts.items():
            below.setdefault(account.parent, []).append(pid)
        own: dict[int, Account] = {}
        pending = [self.root, *(pid for pid in self._own if pid in accounts)]
        while True:
            while pending:
                pid = pending.pop()
                if pid not in own and pid in accounts:
                    own[pid] = accounts[pid]
                    pending += below.get(pid, [])
            pending = [pid for pid in accounts if pid not in own and _agent_of(pid) in own]
            if not pending:
                return own


def read_accounts() -> dict[int, Account]:
    """All processes of this machine."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # ended meanwhile
                continue
            found[int(entry)] = Account(parent=int(fields[1]), ticks=sum(map(int, fields[11:15])))
    return found


def _agent_of(pid: int) -> int | None:
    """The node agent that a fork server names; None: it is something else."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:
        return None
    if b"workers.process.fork_server" not in words or b"--agent" not in words[:-1]:
        return None
    return int(words[words.index(b"--agent") + 1])


class CpuByFile:
    """The pytest plugin, of a test process and of the one that started it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._table = ProcessTable(os.getpid())
        self._file = "collection"
        self._counted = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, name="cpu-by-file", daemon=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            with self._lock:
                self._table.seconds()

    def _turn_to(self, file: str) -> None:
        if file == self._file:
            return
        with self._lock:
            total = self._table.seconds()
        self.seconds[self._file] += total - self._counted
        self._file, self._counted = file, total

    def pytest_sessionstart(self) -> None:
        self._looking.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._turn_to(nodeid.partition("::")[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._over.set()
        self._turn_to("")
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OUTPUT] = dict(self.seconds)


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Seconds of all cores together, since the machine started, and how many of them nobody used."""

    total_s: float
    idle_s: float

    @classmethod
    def now(cls) -> MachineTime:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return cls(sum(ticks) / _TICKS, (ticks[3] + ticks[4]) / _TICKS)

    def until(self, later: MachineTime) -> str:
        """`of 2000 that the cores had, 7% idle`: look at it before changing the number of test processes."""
        total_s = later.total_s - self.total_s
        idle = (later.idle_s - self.idle_s) / total_s if total_s else 0.0
        return f"of {total_s:.0f} that the cores had, {idle:.0%} idle"


class CpuReport:
    """The line at the end of a run, in the process that a person started."""

    def __init__(self, alone: CpuByFile | None) -> None:
        self._alone = alone
        self._began = MachineTime.now()
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get(OUTPUT, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._alone is not None:
            self.seconds.update(self._alone.seconds)
        if total := sum(self.seconds.values()):
            terminalreporter.write_line(line(self.seconds, total, self._began.until(MachineTime.now())))


def line(seconds: Counter[str], total: float, machine: str) -> str:
    """`CPU seconds: 1200 in all, of 2000 that the cores had, 7 % idle; tests/a.py 90, …`"""
    files = ", ".join(f"{file} {spent:.0f}" for file, spent in seconds.most_common(SHOWN) if spent >= 1)
    return f"CPU seconds: {total:.0f} in all, {machine}; {files}"


def register(config: pytest.Config) -> None:
    """Every test process counts; who started them, or the only one, prints."""
    if not Path("/proc/self/stat").exists():
        return
    is_worker = hasattr(config, "workerinput")
    counts = CpuByFile() if is_worker or not getattr(config.option, "numprocesses", None) else None
    if counts is not None:
        config.pluginmanager.register(counts, "dmsc-cpu-by-file")
    if not is_worker:
        config.pluginmanager.register(CpuReport(counts), "dmsc-cpu-report")
