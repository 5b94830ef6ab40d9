"""The incubator of a mesh's fork servers, as long as the mesh runs (docs/adr/0030-an-incubator.md)."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.files.plain_files import plain
from entities.cluster.fork_server_process import INCUBATOR, threads_environment

_GRACE_S = 5.0


@contextmanager
def incubating(log: Path, *options: str) -> Iterator[dict[str, str]]:
    """What lets node agents find one, for their environment; nothing where there is one, or can be none.

    Args:
        log: file that what it prints is appended to.
        options: for `python -m workers.process.incubator`.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open") or os.environ.get(INCUBATOR):
        yield {}
        return
    name = f"dmsc-incubator-{secrets.token_hex(8)}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        open(log, "ab", opener=plain) as output,
    ):
        listener.bind("\0" + name)
        listener.listen()  # here, so that nobody comes too soon
        incubator = subprocess.Popen(
            [
                *(sys.executable, "-m", "workers.process.incubator"),
                *("--fd", str(listener.fileno()), "--parent", str(os.getpid()), *options),
            ],
            cwd=Path(__file__).resolve().parent.parent.parent,
            env={**os.environ, **threads_environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # a Ctrl-C is ours alone
        )
    try:
        yield {INCUBATOR: name}
    finally:
        incubator.kill()  # its fork servers have ended, or end with their agents
        incubator.wait(_GRACE_S)
