"""The prefork server: forks children of `dmsc up` within milliseconds, since it has imported everything.

An interpreter spends about a second of CPU on imports before it does anything. A mesh on one machine has half
a dozen interpreters, and each restart of one costs that second again. The prefork server is forked from the
supervisor before the supervisor has an event loop or threads, and forks children from then on.

It forks twice, so that each child belongs to the supervisor, which becomes the reaper of orphans
(PR_SET_CHILD_SUBREAPER). The process tree, the exit codes and the kernel's signal when a parent dies are then
those of a newly started process, and the death of the prefork server affects no child
(docs/adr/0029-a-zygote.md).

It works on Linux only. Elsewhere, and whenever forking fails, children are started as new processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from bus.parent_death import prctl
from entities.cluster.prefork_client import fork_from
from workers.process import prefork

_PR_SET_CHILD_SUBREAPER = 36
_POOL = "OPENBLAS_NUM_THREADS"

PRELOADED = (
    "dmsc.commands.mesh.run",
    "dmsc.commands.policies.policy",
    "dmsc.process.composition",
    "dmsc.process.serving",
    "dmsc.metrics.listener",
    "bus.connection",
    "entities.authorizer",
    "entities.cluster.agent",
    "entities.gateway",
    "entities.orchestrator",
    "entities.router.service",
    "entities.service_registry.service",
)
"""The modules that a mesh's children import. None of them may start a thread when it is imported."""


class PreforkServer:
    """The supervisor's end of the channel to the prefork server.

    A fork takes milliseconds. A server that does not answer within `answer_s` is not used again.
    """

    def __init__(self, pid: int, channel: socket.socket, *, answer_s: float = 5.0) -> None:
        self.pid = pid
        self._answer_s = answer_s
        self._channel = channel
        self._lock = asyncio.Lock()
        self._usable = True

    @classmethod
    def start(cls) -> PreforkServer | None:
        """Fork the prefork server from this process; return None if that can't be done safely."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or prefork.thread_count() != 1:
            return None
        with _without_pools():
            for name in PRELOADED:
                importlib.import_module(name)
        # From here on, descendants whose parent dies become this process's children.
        if prefork.thread_count() != 1 or not prctl(_PR_SET_CHILD_SUBREAPER, 1):
            return None
        channel, server_channel = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()

        def serve() -> int:
            channel.close()
            return _serve(server_channel, parent)

        pid = prefork.fork(serve, "the prefork server")
        server_channel.close()
        channel.setblocking(False)
        return cls(pid, channel)

    async def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> ForkedProcess | None:
        """Fork a child that runs `dmsc ARGUMENTS` with exactly this environment.

        Its output is appended to the open file `output`. Returns None if forking failed; the caller then
        starts a new process.
        """
        async with self._lock:
            if not self._usable:
                return None
            try:
                async with asyncio.timeout(self._answer_s):
                    return ForkedProcess(*await fork_from(self._channel, arguments, environment, output))
            except (OSError, TimeoutError):
                self.close()
                return None

    def close(self) -> None:
        """End the prefork server; its children live on. Closing twice is fine."""
        if self._usable:
            self._usable = False
            self._channel.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


@contextlib.contextmanager
def running_prefork_server() -> Iterator[PreforkServer | None]:
    """Run a prefork server for the block. Call it before any event loop or thread exists."""
    server = PreforkServer.start()
    try:
        yield server
    finally:
        if server is not None:
            server.close()


class ForkedProcess:
    """A child that `asyncio` did not start, with the used part of the API of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._handle = handle
        self._loop.add_reader(self._handle, self._reap)

    async def wait(self) -> int:
        """Wait until the process ends. Returns its exit code, or the negative number of a signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises `ProcessLookupError` if the process has ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # another part of this process has waited for it: only the code is lost
            self.returncode = 255
        if not self._ended.done():
            self._ended.set_result(self.returncode)


def reap_orphan(children: set[int], candidate: int | None) -> int | None:
    """Reap at most one orphan: an ended process that a dead child has left to this process.

    Args:
        children: The pids of processes that other code waits for.
        candidate: The result of the previous call. Only a process that is found twice is reaped, because
            a child that is just being started is not in `children` yet.

    Returns:
        The pid of a process that has ended and that no code seems to wait for, else None.
    """
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None or ended.si_pid in children:
        return None
    if ended.si_pid == candidate:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
        return None
    return ended.si_pid


@contextlib.contextmanager
def _without_pools() -> Iterator[None]:
    """numpy's library starts threads as it is imported, unless it is told not to: no fork after that."""
    former = os.environ.get(_POOL)
    os.environ[_POOL] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[_POOL]
        else:
            os.environ[_POOL] = former


# --- in the prefork server -------------------------------------------------------------------------------
def _serve(channel: socket.socket, parent: int) -> int:
    """Fork on request until the supervisor closes its end of the channel or dies."""
    prefork.begin("dmsc-prefork", parent)
    prefork.freeze()
    with contextlib.suppress(OSError, ValueError):
        while True:
            prefork.serve(channel, _run_dmsc, name="dmsc", leave=os.setpgrp, orphan=True)
    return 0


def _run_dmsc(arguments: list[str], _: list[int]) -> int:
    """Run in the child what `python -m dmsc ARGUMENTS` would run."""
    sys.argv = ["dmsc", *arguments]
    prefork.title(sys.executable, "-m", "dmsc", *arguments)
    runpy.run_module("dmsc", run_name="__main__", alter_sys=True)
    return 0
