"""Connections between two processes, as the system shows them; cut from outside, without either's help."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from pathlib import Path

import psutil
import pytest

from tests.waiting import eventually

PIDFD_GETFD = 438
"""The same number on all of Linux's architectures; Python has no name for it."""

Ends = tuple[tuple[str, int], tuple[str, int]]
"""(here, there)."""


def between(one: int, other: int) -> dict[Ends, int]:
    """Established TCP connections between two processes: both ends as `one` sees them → its descriptor."""
    far = {(found.laddr, found.raddr) for found in _established(other)}
    return {
        (tuple(found.laddr), tuple(found.raddr)): found.fd
        for found in _established(one)
        if (found.raddr, found.laddr) in far
    }


def _established(pid: int) -> list[psutil._common.pconn]:
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [one for one in found if one.status == psutil.CONN_ESTABLISHED]


def unread_bytes(pid: int, peer: int) -> int:
    """Bytes that `peer` has sent to `pid` and that the latter has not taken."""
    wanted = set(between(pid, peer))
    total = 0
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (_address(fields[1]), _address(fields[2])) in wanted:
            total += int(fields[4].split(":")[1], 16)
    return total


def _address(text: str) -> tuple[str, int]:
    host, port = text.split(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)


async def until_cut(one: int, other: int) -> None:
    """Fails if nothing was cut. The kernel's table is no snapshot: a look at it may miss a connection."""
    await eventually(lambda: cut(one, other), every_s=0.002)


def cut(one: int, other: int) -> list[Ends]:
    """Shuts all connections between two processes down; returns those. Both processes live on."""
    done = []
    for ends, descriptor in between(one, other).items():
        pidfd = os.pidfd_open(one)
        try:
            copied = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, descriptor, 0)
            if copied < 0:
                code = ctypes.get_errno()
                if code in (errno.EPERM, errno.ENOSYS):
                    pytest.skip(f"the system lets nobody at another process's sockets: {os.strerror(code)}")
                continue  # closed meanwhile
            with socket.socket(fileno=copied) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            done.append(ends)
        finally:
            os.close(pidfd)
    return done
