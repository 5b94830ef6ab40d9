"""Forks children from a process that has imported everything. All prefork servers share this module.

A prefork server imports once, stays single-threaded, and forks within milliseconds what else takes seconds:

    server                             forks                        parent of what it forks
    `dmsc/launch/prefork_server.py`    the processes of `dmsc up`   the supervisor (ADR-0029)
    `workers/process/incubator.py`     fork servers                 the incubator (ADR-0030)
    `workers/process/fork_server.py`   instances                    the fork server (DESIGN §6)

The first two have one protocol over a Unix socket. `serve` is their side of it, and the client's side is
`entities/cluster/prefork_client.py`:

    client → [arguments, environment] as a line of JSON, with file descriptors: the child's output, the
             reading end of the start pipe, and further ones that the child needs
    server → the child's pid as a line, with its pidfd; or end of file, if it could make no child

The child starts its work when a byte arrives in the start pipe, because the client then has its pid. At end
of file the child exits: a client that got no answer in time starts another process, and both would run.

The fork server's own protocol reports exits as well; it uses the rest of this module. Nothing here imports
torch.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from bus.parent_death import end_with_parent

_CHUNK_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8


def begin(name: str, parent: int) -> None:
    """Prepare this process to be a prefork server that ends with `parent`."""
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    title(name)  # it imports setproctitle, which must happen before a child replaces its environment


def serve(
    channel: socket.socket,
    run: Callable[[list[str], list[int]], int],
    *,
    name: str,
    leave: Callable[[], object],
    orphan: bool = False,
    reparent_poll_s: float = 0.001,
) -> None:
    """Receive one request and fork a child for it.

    Args:
        channel: The socket to the client.
        run: The child's work. It gets the arguments and the further descriptors, and returns the exit code.
        name: The child's name in error messages.
        leave: Called first in the child. It starts a new process group or session, and closes descriptors of
            the server.
        orphan: Fork twice and let the process in between exit, so that the child's parent is the nearest
            ancestor that is a reaper of orphans (PR_SET_CHILD_SUBREAPER).
        reparent_poll_s: Pause between two looks of the child whether that is its parent.

    Raises:
        ValueError: The request was cut short.
        OSError: The system makes no process, or the client has gone.
    """
    descriptors: list[int] = []
    try:
        arguments, environment = json.loads(_line(channel, descriptors))
        output, start_reader, *further = descriptors
        if thread_count() != 1:
            raise OSError("threads exist, and a child would wait forever for locks that they hold")

        def child(parent: int) -> int:
            leave()
            channel.close()
            redirect(output)
            os.environ.clear()
            os.environ.update(environment)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            gc.enable()
            random.seed()
            while orphan and os.getppid() == parent:  # until the reaper is the parent
                time.sleep(reparent_poll_s)
            if not os.read(start_reader, 1):  # the client did not receive this pid in time
                return 0
            os.close(start_reader)
            return run(arguments, further)

        def answer() -> int:
            parent = os.getpid()
            try:
                pid = fork(lambda: child(parent), name)
                handle = os.pidfd_open(pid)
                try:
                    socket.send_fds(channel, [b"%d\n" % pid], [handle])
                finally:
                    os.close(handle)
            except OSError as error:
                return error.errno or errno.EIO
            return 0

        # The server ignores SIGINT, and so would the child until it has its own handler: hold it till then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            failure = os.waitstatus_to_exitcode(os.waitpid(fork(answer, name), 0)[1]) if orphan else answer()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if failure:
            raise OSError(failure, os.strerror(failure))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _line(channel: socket.socket, descriptors: list[int]) -> bytes:
    """Receive a line; append the file descriptors that come with it to `descriptors`."""
    line, received, _, _ = socket.recv_fds(channel, _CHUNK_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    descriptors += received
    while not line.endswith(b"\n"):
        more = channel.recv(_CHUNK_BYTES)
        if not more:
            raise ValueError("it was cut short")
        line += more
    return line


def fork(work: Callable[[], int], name: str | None) -> int:
    """Fork a process that exits with the code that `work` returns; return its pid."""
    pid = os.fork()
    if pid == 0:
        end_with(work, name)
    return pid


def end_with(work: Callable[[], int], name: str | None) -> NoReturn:
    """Exit with the code that `work` returns; 130 for SIGINT, 1 for what else it raises, which is printed."""
    code = 1
    try:
        code = work()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        print(f"{name} failed: {type(error).__name__}: {text}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


def redirect(output: int) -> None:
    """Replace standard output and error by the open file `output`, and standard input by an empty one."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, output, output)):
        os.dup2(descriptor, number)
    os.close(null)
    os.close(output)


def thread_count() -> int:
    """The number of threads of this process; on Linux, native ones included."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def freeze() -> None:
    """Exempt all objects from garbage collection: a child's collector would copy every shared page."""
    gc.collect()
    gc.freeze()


def title(*words: str) -> None:
    """Set this process's command line in the process table."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(" ".join(words))
