"""Reachability of peers: probes of their addresses, and earlier timeouts for silent connections.

A network partition between two machines is silent: no connection is refused or reset. The kernel resends for
a quarter of an hour, and gloo's listening side (torch 2.13) waits five times its timeout for a connection
that never comes. So this module makes the kernel give up sooner, and a group build that takes too long probes
the other ranks' addresses. A refused connection means that the machine was reached: only silence and "no
route" count as unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat

DESCRIPTORS = "/proc/self/fd"


async def reaches(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether anything answers at the address, even with a refusal; True if the name can't be resolved.

    The default timeout has room for two SYNs, a second apart.
    """
    try:
        async with asyncio.timeout(timeout_s):
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
    """Ports on which this process listens; empty on systems without `/proc` (all but Linux)."""
    ports: set[int] = set()
    for descriptor in _sockets():
        try:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(int(sock.getsockname()[1]))
        except (OSError, IndexError, TypeError):
            continue  # closed meanwhile, or a Unix socket
    return ports


def connections() -> set[int]:
    """Inodes of this process's sockets, from which a later call tells the new ones."""
    inodes = set()
    for descriptor in _sockets():
        with contextlib.suppress(OSError):
            inodes.add(os.fstat(descriptor).st_ino)
    return inodes


def give_up_silent(known: set[int], silent_s: float) -> None:
    """Makes the kernel break connections opened since `known` after `silent_s` without acknowledgement."""
    for descriptor in _sockets():
        try:
            if os.fstat(descriptor).st_ino in known:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
        except OSError:
            continue  # closed meanwhile


def _sockets() -> list[int]:
    try:
        names = os.listdir(DESCRIPTORS)
    except FileNotFoundError:
        return []
    descriptors = []
    for name in names:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                descriptors.append(int(name))
    return descriptors
