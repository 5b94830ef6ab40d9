"""Incubator of a machine's fork servers: imports torch once for all nodes (docs/adr/0030-an-incubator.md).

Starting a fork server takes mostly `import torch`. This process has imported it already and forks a fork
server in milliseconds: for several nodes of a mesh on one machine, or after a fork server was killed. It is
started as `python -m workers.process.incubator --fd N --parent PID`, imports nothing costly before the first
request, and ends with that parent; fork servers go on without it.

It listens on an inherited abstract Unix socket (Linux) and serves only its own user. A connection is one
request:

    node agent → length (u32), with two descriptors: the fork server's channel, and the file for its output
                 [arguments, environment, directory] as JSON
    incubator  → pid (i32; -1: no process could be made), with its pidfd

The forked process behaves like `python -m workers.process.fork_server` with those arguments, except that its
parent is this process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from workers.process import fork_server
from workers.process.child_process import end_with

LENGTH = struct.Struct("!I")
PID = struct.Struct("!i")
NONE = -1

_PEER = struct.Struct("3i")  # pid, uid, gid
_PATIENCE_S = 10.0
"""Timeout of one request; no other request is served meanwhile."""
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until its parent ends."""
    parser = argparse.ArgumentParser(prog="python -m workers.process.incubator")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to listen at")
    parser.add_argument("--parent", type=int, required=True, help="the process to end with")
    parser.add_argument("--all", action="store_true", help="import also what only some jobs need")
    options = parser.parse_args(arguments)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != options.parent:
        return
    _title("dmsc-incubator")  # setproctitle must be imported before a child's environment is replaced
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(fileno=options.fd) as listener:
        warm = False
        while True:
            caller, _ = listener.accept()
            with caller:
                if not _is_own_user(caller):
                    continue
                warm = warm or _warm_up(with_all=options.all)
                try:
                    _serve(listener, caller)
                except (OSError, ValueError) as error:  # only this request fails; the next is served
                    print(f"incubator: a request failed: {error}", file=sys.stderr, flush=True)


def _warm_up(*, with_all: bool) -> bool:
    """Imports the modules to preload; returns whether forking is safe from now on."""
    try:
        fork_server.preload(fork_server.PRELOAD + (fork_server.PRELOAD_IN_QUIET if with_all else ()))
    except Exception:  # a fork server started without fork will report it in its own log
        traceback.print_exc()
        return False
    fork_server.warm_up()
    gc.collect()
    gc.freeze()  # else a child's collector would visit all objects, and so copy every shared page
    return fork_server.thread_count() == 1


def _is_own_user(caller: socket.socket) -> bool:
    """Whether the caller runs as this process's user; an abstract socket has no permissions of its own."""
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(credentials)[1]) == os.getuid()


def _serve(listener: socket.socket, caller: socket.socket) -> None:
    caller.settimeout(_PATIENCE_S)
    head, descriptors, _, _ = socket.recv_fds(caller, LENGTH.size, 2)
    try:
        if len(head) < LENGTH.size or len(descriptors) < 2:
            raise ValueError("it was cut short")
        body = _read_exactly(caller, LENGTH.unpack(head)[0])
        channel, output = descriptors
        pid = NONE if fork_server.thread_count() != 1 else os.fork()
        if pid == 0:
            listener.close()
            caller.close()
            _become(channel, output, *json.loads(body))
        try:
            handle = NONE if pid == NONE else os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended and was reaped
            handle = NONE
        if handle == NONE:
            caller.sendall(PID.pack(NONE))
            return
        try:
            socket.send_fds(caller, [PID.pack(pid)], [handle])
        finally:
            os.close(handle)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read_exactly(caller: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = caller.recv(count - len(data))
        if not piece:
            raise ValueError("it was cut short")
        data += piece
    return data


def _become(
    channel: int, output: int, arguments: list[str], environment: dict[str, str], directory: str
) -> NoReturn:
    """Makes this child what `python -m workers.process.fork_server` would be."""

    def work() -> int:
        os.setsid()  # as its agent would start it, so that it is one process group to kill
        null = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((null, output, output)):
            os.dup2(descriptor, number)
        os.close(null)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        command_line = ["--fd", str(channel), *arguments]
        _title(" ".join([sys.executable, "-m", "workers.process.fork_server", *command_line]))
        fork_server.main(command_line)
        return 0

    end_with(work, "the fork server")


def _title(text: str) -> None:
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(text)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
