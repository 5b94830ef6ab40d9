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
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ANSWER_S = 5.0
"""A fork takes milliseconds. A prefork server that does not answer within these seconds is not used again."""
_LENGTH = struct.Struct("!I")
_PID = struct.Struct("!i")
_FAILED = -1

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


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A request to fork a child that runs `dmsc ARGUMENTS` with exactly this environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


class PreforkServer:
    """The supervisor's end of the channel to the prefork server."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._lock = asyncio.Lock()
        self._usable = True

    @classmethod
    def start(cls) -> PreforkServer | None:
        """Fork the prefork server from this process; return None if that can't be done safely."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or _threads() != 1:
            return None
        for name in PRELOADED:
            importlib.import_module(name)
        if _threads() != 1 or not _reap_orphans():
            return None
        channel, server_channel = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                _serve(server_channel, parent)
            finally:
                os._exit(1)
        server_channel.close()
        channel.setblocking(False)
        return cls(pid, channel)

    async def fork(self, order: ForkOrder, output: int) -> ForkedProcess | None:
        """Fork a child whose output is appended to the open file `output`.

        Returns None if forking failed; the caller then starts a new process.
        """
        async with self._lock:
            if not self._usable:
                return None
            try:
                async with asyncio.timeout(_ANSWER_S):
                    pid = await self._request(order, output)
            except (OSError, TimeoutError):
                pid = _FAILED
            if pid == _FAILED:
                self.close()
                return None
            return ForkedProcess(pid)

    async def _request(self, order: ForkOrder, output: int) -> int:
        """Request a fork and return the child's pid, or `_FAILED`.

        The child begins only after this process has received its pid. Otherwise a child whose pid was lost
        would run beside the one that replaces it.
        """
        loop = asyncio.get_running_loop()
        body = json.dumps([list(order.arguments), dict(order.environment)]).encode()
        start_reader, start_writer = os.pipe()
        try:
            socket.send_fds(self._channel, [_LENGTH.pack(len(body))], [output, start_reader])
            await loop.sock_sendall(self._channel, body)
            answer = b""
            while len(answer) < _PID.size:
                more = await loop.sock_recv(self._channel, _PID.size - len(answer))
                if not more:
                    return _FAILED
                answer += more
            os.write(start_writer, b"+")
            return int(_PID.unpack(answer)[0])
        finally:
            os.close(start_reader)
            os.close(start_writer)

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

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._handle = os.pidfd_open(pid)
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


def reap_orphan(known: set[int], seen: int | None) -> int | None:
    """Reap at most one orphan: an ended process that a dead child has left to this process.

    Args:
        known: The pids of processes that other code waits for.
        seen: The result of the previous call. Only a process that is found twice is reaped, because a child
            that is just being started is not in `known` yet.

    Returns:
        The pid of a process that has ended and that no code seems to wait for, else None.
    """
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None or ended.si_pid in known:
        return None
    if ended.si_pid == seen:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
        return None
    return ended.si_pid


# --- in the prefork server -------------------------------------------------------------------------------
def _serve(channel: socket.socket, parent: int) -> NoReturn:
    """Fork on request until the supervisor closes its end of the channel or dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _title("dmsc-zygote")
    gc.collect()
    gc.freeze()  # otherwise the collector would write to, and so copy, every page shared with the children
    while True:
        head, files, _, _ = socket.recv_fds(channel, _LENGTH.size, 2)
        if len(head) < _LENGTH.size or len(files) < 2:
            os._exit(0)
        output, start_reader = files
        body = _exactly(channel, _LENGTH.unpack(head)[0])
        arguments, environment = json.loads(body)
        pid = _fork_twice(channel, output, start_reader, arguments, environment)
        os.close(output)
        os.close(start_reader)
        channel.sendall(_PID.pack(pid))


def _exactly(channel: socket.socket, count: int) -> bytes:
    """Receive `count` bytes; exit if the channel ends."""
    data = b""
    while len(data) < count:
        more = channel.recv(count - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def _fork_twice(
    channel: socket.socket, output: int, start_reader: int, arguments: list[str], environment: dict[str, str]
) -> int:
    """Fork a grandchild and return its pid. It belongs to the supervisor as soon as the child has exited."""
    reader, writer = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return _FAILED
    if between == 0:
        try:
            me = os.getpid()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                os.close(writer)
                channel.close()
                _run_dmsc(me, output, start_reader, arguments, environment)
            os.write(writer, _PID.pack(pid))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(between, 0)
    answer = os.read(reader, _PID.size)
    os.close(reader)
    return int(_PID.unpack(answer)[0]) if answer else _FAILED


def _run_dmsc(
    between: int, output: int, start_reader: int, arguments: list[str], environment: dict[str, str]
) -> NoReturn:
    """Run in the grandchild what `python -m dmsc ARGUMENTS` would run."""
    code = 1
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(null)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
        random.seed()
        sys.argv = ["dmsc", *arguments]
        _title(" ".join([sys.executable, "-m", "dmsc", *arguments]))
        while os.getppid() == between:  # until the supervisor is the parent
            time.sleep(0.001)
        start = os.read(start_reader, 1)
        os.close(start_reader)
        if not start:  # the supervisor did not receive this pid in time
            os._exit(0)
        runpy.run_module("dmsc", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


# --- the system ------------------------------------------------------------------------------------------
def _prctl(option: int, value: int) -> bool:
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def _reap_orphans() -> bool:
    """Make this process the new parent of descendants whose parent dies; return whether that worked."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _title(text: str) -> None:
    import setproctitle

    setproctitle.setproctitle(text)
