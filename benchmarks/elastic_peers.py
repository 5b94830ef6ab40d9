"""Goodput of torchrun and torchft under the same kills: four processes, one killed every so often.

Settings, chosen in their favour where there is a choice: torchrun with `--monitor-interval 0.1` and restarts
without end; torchft with a lighthouse that takes a silent replica for dead after 1 s (instead of 5) and waits
up to 10 s for live stragglers, as its README has it (with 0.1 the four split up and heal each other for
minutes), collectives that fail after 2 s (instead of 60), and each replica started again as soon as it has
ended. The window begins with the first commit that all four took part in; what is in the weights at its end
counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import psutil

HERE = Path(__file__).resolve().parent
RANK = HERE / "elastic_rank.py"
FIRST_COMMIT_S = 90.0
LOOK_EVERY_S = 0.02
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
timeouts = {"join_timeout_ms": 10000, "heartbeat_timeout_ms": 1000}
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **timeouts)
print(server.address(), flush=True)
sys.stdin.read()
"""


class NeverAtWork(Exception):
    """A peer did not get going, or ended; the text says how far it came."""


class Contender(Protocol):
    """Four processes at work."""

    def victims(self) -> list[int]: ...
    def tend(self) -> None: ...


def missing(peer: str) -> str:
    """Why a peer can't be run here, in words; empty if it can."""
    if peer != "torchft":
        return ""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed (pip install 'dmsc[bench-peers]')"
    tried = subprocess.run([sys.executable, "-c", "import torchft"], capture_output=True, text=True)
    return f"torchft can't be imported: {_last_line(tried.stderr)}" if tried.returncode else ""


def rate(peer: str, workload: dict[str, Any], seconds: float, every_s: float | None, seed: int) -> float:
    """Committed samples/s over a window of `seconds`, with a process killed every `every_s` (None: never)."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix=f"dmsc-{peer}-") as name:
        folder = Path(name)
        with _started(peer, workload, folder) as contender:
            began, first = _all_at_work(folder, contender, workload)
            due = None if every_s is None else began + every_s * (0.9 + 0.2 * draw.random())
            while (now := time.time()) < began + seconds:
                contender.tend()
                if every_s is not None and due is not None and now >= due:
                    _kill(draw, contender)
                    due += every_s
                time.sleep(LOOK_EVERY_S)
            # what torchrun's rank 0 had in memory and no checkpoint holds is lost with it, and comes again
            samples = max(count for count, at in _commits(folder) if at <= began + seconds)
            return (samples - first) / seconds


def _all_at_work(folder: Path, contender: Contender, workload: dict[str, Any]) -> tuple[float, int]:
    """When the first step with everybody's share was committed, and the samples by then."""
    whole = workload["microbatches"] * workload["microbatch_samples"]
    deadline = time.monotonic() + FIRST_COMMIT_S
    while True:
        first_at: dict[int, float] = {}
        for samples, at in _commits(folder):
            first_at[samples] = min(at, first_at.get(samples, at))
        for before, after in pairwise(sorted(first_at)):
            if after - before == whole:
                return first_at[after], after
        contender.tend()
        if time.monotonic() > deadline:
            log = (folder / "log.txt").read_text(errors="replace")
            raise NeverAtWork(f"not all at work within {FIRST_COMMIT_S:.0f} s: {_last_line(log)}")
        time.sleep(LOOK_EVERY_S)


def _last_line(log: str) -> str:
    return (log.strip().splitlines() or ["nothing in its log"])[-1][:300]


def _commits(folder: Path) -> list[tuple[int, float]]:
    """(samples, time) of every whole line so far."""
    found = []
    for file in folder.glob("rank-*.txt"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                samples, at = line.split()
                found.append((int(samples), float(at)))
    return found


def _kill(draw: random.Random, contender: Contender) -> None:
    victims = contender.victims()
    if victims:
        os.kill(draw.choice(sorted(victims)), signal.SIGKILL)


@contextmanager
def _started(peer: str, workload: dict[str, Any], folder: Path) -> Iterator[Contender]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [str(RANK), peer, "--folder", str(folder), "--workload", json.dumps(workload)]
    with (folder / "log.txt").open("ab") as log:
        if peer == "torchrun":
            contender: _Torchrun | _Torchft = _Torchrun(command, workload["ranks"], environment, log)
        else:
            contender = _Torchft(command, workload["ranks"], environment, log)
        try:
            yield contender
        finally:
            contender.stop()


class _Torchrun:
    """An elastic agent with its workers; a death makes it restart all of them."""

    def __init__(self, command: list[str], ranks: int, environment: dict[str, str], log: Any) -> None:
        options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"]
        options += ["--monitor-interval", "0.1"]
        self._agent = psutil.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *command],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def victims(self) -> list[int]:
        try:
            return [each.pid for each in self._agent.children() if str(RANK) in each.cmdline()]
        except psutil.Error:  # one of them ended while we looked: the agent is restarting them
            return []

    def tend(self) -> None:
        if self._agent.poll() is not None:
            raise NeverAtWork(f"torchrun ended with {self._agent.returncode}")

    def stop(self) -> None:
        family = [*self._agent.children(recursive=True), self._agent]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._agent.wait()


class _Torchft:
    """A lighthouse and replica groups of one process; the one that died is started again at once."""

    def __init__(self, command: list[str], ranks: int, environment: dict[str, str], log: Any) -> None:
        self._lighthouse = subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
        assert self._lighthouse.stdout is not None
        address = self._lighthouse.stdout.readline().strip()
        self._environment = {**environment, "TORCHFT_LIGHTHOUSE": address}
        self._command, self._log = [sys.executable, *command], log
        self._replicas = [self._start(rank) for rank in range(ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._command, "--rank", str(rank)], env=self._environment, stdout=self._log, stderr=self._log
        )

    def victims(self) -> list[int]:
        return [replica.pid for replica in self._replicas if replica.poll() is None]

    def tend(self) -> None:
        for rank, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._replicas[rank] = self._start(rank)

    def stop(self) -> None:
        for replica in self._replicas:
            replica.kill()
            replica.wait()
        self._lighthouse.kill()
        self._lighthouse.wait()
