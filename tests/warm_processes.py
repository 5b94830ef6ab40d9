"""Processes forked from one that has imported everything already: each import of torch takes seconds.

One server per test process, started when first needed; it ends with it. What is forked is a process like any
other: its own pid, its own exit code, killed like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from bus.parent_death import end_with_parent
from dmsc.launch import prefork_server
from dmsc.launch.incubation import incubating
from entities.cluster.fork_server_process import INCUBATOR

ENDING = contextlib.ExitStack()
atexit.register(ENDING.close)
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch",
    "torch.distributed",
    "bus.connection",
    "workers.links.hop_exchange",
    "workers.links.reduction",
    "httpx",
    "dmsc.cli",
    "dmsc.client.client",
    "dmsc.launch.mesh",
    *prefork_server.PRELOADED,
    __name__,
]


def warm_up() -> None:
    """Starts the server, unless it runs."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


SHARED_INCUBATOR = "DMSC_TEST_INCUBATOR"
"""Environment variable: the name of the incubator that all test processes share."""


def share_incubator() -> None:
    """For the tests' processes that are started from here on."""
    os.environ[SHARED_INCUBATOR] = incubator().get(INCUBATOR, "")


@functools.cache
def incubator() -> dict[str, str]:
    """For the environment of a mesh: its fork servers are forked from one that all tests share."""
    if shared := os.environ.get(SHARED_INCUBATOR):
        return {INCUBATOR: shared}
    return ENDING.enter_context(incubating(Path(os.devnull), "--all"))


def start(script: Path, *args: object) -> tuple[ForkServerProcess, Connection]:
    """A script's process, and the reading end of its standard output."""
    warm_up()
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_script, args=(writer, str(script), [str(arg) for arg in args]))
    process.start()
    writer.close()
    return process, reader


def _end_with_the_tests() -> None:
    """In whatever way these end: our server lives as long as anybody holds the pipe that is closed here.

    A process that is stopped at that moment stays: it is sent SIGTERM.
    """
    held = forkserver._forkserver._forkserver_alive_fd  # it has no public name
    assert held is not None
    os.close(held)
    forkserver._forkserver._forkserver_alive_fd = None
    end_with_parent(os.getppid())


def _script(output: Connection, script: str, args: list[str]) -> None:
    _end_with_the_tests()
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


class WarmProcess:
    """What we use of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess, command: tuple[str, ...]) -> None:
        self._process = process
        self._command = command
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout_s or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_module(
    module: str,
    arguments: tuple[str, ...],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    out: Path,
    err: Path | None = None,
) -> WarmProcess:
    """`python -m module ARGUMENTS`, its output appended to `out`, and its errors, unless to `err`."""
    warm_up()
    for file in {out, err or out} - {Path(os.devnull)}:
        file.touch()
    given = (module, arguments, str(cwd), dict(environment), str(out), str(err or out))
    process = CONTEXT.Process(target=_module, args=given)
    process.start()
    return WarmProcess(process, (module, *arguments))


def run_module(
    module: str, arguments: tuple[str, ...], *, cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`python -m module ARGUMENTS`, to the end; raises `subprocess.TimeoutExpired`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start_module(module, arguments, cwd=cwd, environment=environment, out=out, err=err)

        def said() -> list[str]:
            return [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]

        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise subprocess.TimeoutExpired([module, *arguments], timeout_s, *said()) from None
        return subprocess.CompletedProcess([module, *arguments], code, *said())


def _module(
    module: str, arguments: tuple[str, ...], cwd: str, environment: dict[str, str], out: str, err: str
) -> None:
    _end_with_the_tests()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # found by the environment of whoever asked first
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.path.insert(0, cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
