"""Runs the incubator from which node agents' fork servers are forked, as long as the mesh runs.

See docs/adr/0030-an-incubator.md.
"""

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


@contextmanager
def incubating(log: Path, *options: str, grace_s: float = 5.0) -> Iterator[dict[str, str]]:
    """Run an incubator for the block; yield the environment variables with which node agents find it.

    The mapping is empty if an incubator exists already, or if this system can't have one.

    Args:
        log: The file to which the incubator's output is appended.
        options: Options of `python -m workers.process.incubator`.
        grace_s: How long the killed incubator may take to end.
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
        listener.listen()  # before the incubator starts, so that no agent connects too early
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
            start_new_session=True,  # so that a terminal's Ctrl-C reaches only this process
        )
    try:
        yield {INCUBATOR: name}
    finally:
        incubator.kill()  # fork servers have ended, or end with their agents
        incubator.wait(grace_s)
