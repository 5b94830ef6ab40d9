"""Whether a peer can be reached at all, and how soon a connection to one that can't is given up.

A cut between two machines is silence: nothing refuses, nothing resets. What was sent already is resent by
the kernel for a quarter of an hour, and gloo's listening side (torch 2.13) waits five times its timeout for a
connection that never comes. So the kernel is asked to give up sooner, and whoever builds in vain dials the
others itself. A dial that is refused reached somebody: only silence and "no route" count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat

SILENT_S = 4.0
"""Unacknowledged for this long, a connection is broken (TCP_USER_TIMEOUT). Longer rides out longer gaps of
the network, shorter notices a cut sooner. A peer that computes acknowledges meanwhile: its kernel does."""
DIAL_S = 2.0
"""Patience with one dial: two SYNs, a second apart."""
DESCRIPTORS = "/proc/self/fd"


async def reaches(host: str, port: int) -> bool:
    """Whether anything answers there, be it a refusal; what can't be resolved says nothing against it."""
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except (ConnectionRefusedError, socket.gaierror):
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def listening() -> set[int]:
    """Ports on which this process listens; empty where the system does not tell (all but Linux)."""
    found: set[int] = set()
    for descriptor in _sockets():
        try:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(sock.getsockname()[1]))
        except (OSError, IndexError, TypeError):
            continue  # closed meanwhile, or a Unix socket
    return found


def connections() -> set[int]:
    """Inodes of this process's sockets: to tell later which ones are new."""
    found = set()
    for descriptor in _sockets():
        with contextlib.suppress(OSError):
            found.add(os.fstat(descriptor).st_ino)
    return found


def give_up_silent(known: set[int]) -> None:
    """Has the kernel break connections that were opened since `known`, once their peer is silent."""
    for descriptor in _sockets():
        try:
            if os.fstat(descriptor).st_ino in known:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))
        except OSError:
            continue  # closed meanwhile


def _sockets() -> list[int]:
    try:
        names = os.listdir(DESCRIPTORS)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                found.append(int(name))
    return found
