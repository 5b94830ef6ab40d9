"""Prefork servers: what becomes of requests whose server is fast, and of signals to children just begun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from entities.cluster.prefork_client import fork_from


async def test_a_server_may_have_answered_and_closed_before_the_client_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    send_fds = socket.send_fds
    answered: list[int] = []

    def send_and_be_answered(channel: socket.socket, parts: Iterable[bytes], handles: Iterable[int]) -> Any:
        """The whole request, and the server's answer, before the client has the processor again."""
        sent = send_fds(channel, list(parts), list(handles))
        _, received, _, _ = socket.recv_fds(theirs, 1 << 16, 8)
        for descriptor in received:
            os.close(descriptor)
        handle = os.pidfd_open(os.getpid())
        send_fds(theirs, [b"%d\n" % os.getpid()], [handle])
        os.close(handle)
        theirs.close()
        answered.append(sent)
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_be_answered)
    output = os.open(os.devnull, os.O_WRONLY)
    try:
        with ours:
            pid, handle = await fork_from(ours, ["work"], {"KEY": "value"}, output)
        os.close(handle)
    finally:
        os.close(output)
    assert pid == os.getpid()
    assert answered  # the server was as fast as that


SIGNALLED_EARLY = """
import os, signal, socket
from workers.process import prefork

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `prefork.begin` does
ours, theirs = socket.socketpair()
start_reader, start_writer = os.pipe()
output = os.open(os.devnull, os.O_WRONLY)
socket.send_fds(ours, [b'[[], {}]\\n'], [output, start_reader])
os.write(start_writer, b".")
prefork.serve(
    theirs, lambda arguments, further: 0, name="child", leave=lambda: os.kill(os.getpid(), signal.SIGINT)
)
pid = int(socket.recv_fds(ours, 64, 1)[0])
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_an_interrupt_of_a_child_that_has_just_begun_ends_it() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SIGNALLED_EARLY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.stdout.strip(), found.stderr) == ("130", "")
