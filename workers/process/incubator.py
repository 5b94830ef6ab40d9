"""Incubator of a machine's fork servers: imports torch once for all nodes (docs/adr/0030-an-incubator.md).

A fork server is mostly `import torch`. Where several nodes of a mesh share a machine, or one fork server was
killed, this process has done it already and forks the next one in milliseconds. It is started as
`python -m workers.process.incubator --fd N --parent PID`, imports nothing costly before the first request,
and ends with that parent; fork servers go on without it.

It listens at an abstract Unix socket (Linux), which it inherits, and hears only its own user. A connection is
one request as `workers/process/prefork.py` describes it; the further descriptor is the fork server's channel.

What it forks is `python -m workers.process.fork_server` with those arguments, in all but its parent, which is
this process. Both have the folder of our packages as working directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence

from workers.process import fork_server, prefork

_PEER = struct.Struct("3i")  # pid, uid, gid


def main(arguments: Sequence[str] | None = None, *, request_timeout_s: float = 10.0) -> None:
    """Serves until its parent ends.

    A client sends its request at once, within `request_timeout_s`; no other client is served meanwhile.
    """
    parser = argparse.ArgumentParser(prog="python -m workers.process.incubator")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to listen at")
    parser.add_argument("--parent", type=int, required=True, help="the process to end with")
    parser.add_argument("--all", action="store_true", help="import also what only some jobs need")
    options = parser.parse_args(arguments)
    prefork.begin("dmsc-incubator", options.parent)
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(fileno=options.fd) as listener:

        def leave() -> None:
            os.setsid()  # as its agent would start it: there is one group to kill
            listener.close()

        warm = False
        while True:
            caller, _ = listener.accept()
            with caller:
                if not _is_ours(caller):
                    continue
                warm = warm or _warm_up(with_all=options.all)
                caller.settimeout(request_timeout_s)
                try:
                    prefork.serve(caller, _run, name="the fork server", leave=leave)
                except (OSError, ValueError, TypeError) as error:  # of one caller: the next one is heard
                    print(f"incubator: a request failed: {error}", file=sys.stderr, flush=True)


def _warm_up(*, with_all: bool) -> bool:
    """Whether forking is safe from here on."""
    try:
        fork_server.preload(fork_server.PRELOAD + (fork_server.PRELOAD_IN_QUIET if with_all else ()))
    except Exception:  # the fork server that is started afresh will say it in its own log
        traceback.print_exc()
        return False
    fork_server.warm_up()
    prefork.freeze()
    return prefork.thread_count() == 1


def _is_ours(caller: socket.socket) -> bool:
    """An abstract socket has no permissions: only who may do anything in our name anyway is heard."""
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(credentials)[1]) == os.getuid()


def _run(arguments: list[str], descriptors: list[int]) -> int:
    """Run in the child what `python -m workers.process.fork_server` would run."""
    (channel,) = descriptors
    full_arguments = ["--fd", str(channel), *arguments]
    prefork.title(sys.executable, "-m", "workers.process.fork_server", *full_arguments)
    fork_server.main(full_arguments)
    return 0


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
