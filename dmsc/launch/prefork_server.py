"""Children of `dmsc up`, forked from one process that has imported everything: milliseconds, not a second.

An interpreter spends about a second of CPU on imports before it does anything, and a mesh on one machine is
half a dozen of them; so is every restart of one that died. The zygote is forked from the supervisor before
that has an event loop or threads, and forks from then on. It forks twice, so that a child belongs to the
supervisor (which becomes the reaper of orphans, PR_SET_CHILD_SUBREAPER): process tree, exit codes and the
kernel's word that a parent has died are those of a child that was started afresh, and the death of the zygote
costs nobody anything (docs/adr/0029-a-zygote.md).

Linux only; elsewhere, and whenever forking fails, children are started afresh.
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
"""A fork takes milliseconds; who does not answer within this is not asked again."""
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
"""What the children of a mesh import. None of them may start a thread."""


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A child to be forked: `dmsc ARGUMENTS` with exactly this environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


class PreforkServer:
    """The supervisor's end."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._asking = asyncio.Lock()
        self._usable = True

    @classmethod
    def hatch(cls) -> PreforkServer | None:
        """Forks it from this process; None where that can't be done safely."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or _threads() != 1:
            return None
        for name in PRELOADED:
            importlib.import_module(name)
        if _threads() != 1 or not _reap_orphans():
            return None
        mine, its = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                _serve(its, parent)
            finally:
                os._exit(1)
        its.close()
        mine.setblocking(False)
        return cls(pid, mine)

    async def fork(self, order: ForkOrder, output: int) -> ForkedProcess | None:
        """A new child, its output appended to the open file `output`; None: start it afresh."""
        async with self._asking:
            if not self._usable:
                return None
            try:
                async with asyncio.timeout(_ANSWER_S):
                    pid = await self._ask(order, output)
            except (OSError, TimeoutError):
                pid = _FAILED
            if pid == _FAILED:
                self.close()
                return None
            return ForkedProcess(pid)

    async def _ask(self, order: ForkOrder, output: int) -> int:
        """The pid of a child that begins once that is known: of one that nobody heard of there would
        soon be two."""
        loop = asyncio.get_running_loop()
        body = json.dumps([list(order.arguments), dict(order.environment)]).encode()
        waits, known = os.pipe()
        try:
            socket.send_fds(self._channel, [_LENGTH.pack(len(body))], [output, waits])
            await loop.sock_sendall(self._channel, body)
            answer = b""
            while len(answer) < _PID.size:
                more = await loop.sock_recv(self._channel, _PID.size - len(answer))
                if not more:
                    return _FAILED
                answer += more
            os.write(known, b"+")
            return int(_PID.unpack(answer)[0])
        finally:
            os.close(waits)
            os.close(known)

    def close(self) -> None:
        """Ends it; its children live on. Twice is fine."""
        if self._usable:
            self._usable = False
            self._channel.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


@contextlib.contextmanager
def running_prefork_server() -> Iterator[PreforkServer | None]:
    """One for the block, before any event loop or thread."""
    zygote = PreforkServer.hatch()
    try:
        yield zygote
    finally:
        if zygote is not None:
            zygote.close()


class ForkedProcess:
    """A child that `asyncio` did not start, with what we use of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._handle = os.pidfd_open(pid)
        self._loop.add_reader(self._handle, self._reap)

    async def wait(self) -> int:
        """Its exit code; of a signal, negative."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Raises `ProcessLookupError` if it has ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else has waited for it: the code is lost, the end is not
            self.returncode = 255
        if not self._ended.done():
            self._ended.set_result(self.returncode)


def reap_orphan(known: set[int], seen: int | None) -> int | None:
    """Buries at most one process that was left to us by a child that died.

    Args:
        known: pids that somebody waits for.
        seen: what the call before has returned: only who is found twice is buried, since a child that is just
            being started is not known yet.

    Returns:
        The pid of one that has ended and that nobody waits for, as far as can be seen now.
    """
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None or found.si_pid in known:
        return None
    if found.si_pid == seen:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)
        return None
    return found.si_pid


# --- in the zygote ---------------------------------------------------------------------------------------
def _serve(channel: socket.socket, parent: int) -> NoReturn:
    """Forks on demand until the supervisor's end is closed or dies with it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the supervisor's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _title("dmsc-zygote")
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that is shared with the children
    while True:
        head, files, _, _ = socket.recv_fds(channel, _LENGTH.size, 2)
        if len(head) < _LENGTH.size or len(files) < 2:
            os._exit(0)
        output, waits = files
        body = _exactly(channel, _LENGTH.unpack(head)[0])
        arguments, environment = json.loads(body)
        pid = _fork_twice(channel, output, waits, arguments, environment)
        os.close(output)
        os.close(waits)
        channel.sendall(_PID.pack(pid))


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = channel.recv(count - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def _fork_twice(
    channel: socket.socket, output: int, waits: int, arguments: list[str], environment: dict[str, str]
) -> int:
    """The pid of the grandchild, which by then belongs to the supervisor."""
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
                _become(me, output, waits, arguments, environment)
            os.write(writer, _PID.pack(pid))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(between, 0)
    answer = os.read(reader, _PID.size)
    os.close(reader)
    return int(_PID.unpack(answer)[0]) if answer else _FAILED


def _become(
    between: int, output: int, waits: int, arguments: list[str], environment: dict[str, str]
) -> NoReturn:
    """In the child: what `python -m dmsc ARGUMENTS` would be."""
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
        while os.getppid() == between:  # until it has left us to the supervisor
            time.sleep(0.001)
        known = os.read(waits, 1)
        os.close(waits)
        if not known:  # the supervisor did not learn of us in time
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
    """From here on, whose parent dies becomes this process's child."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _title(text: str) -> None:
    import setproctitle

    setproctitle.setproctitle(text)
