"""The client of prefork servers: requests a forked child by the protocol of `workers/process/prefork.py`.

`dmsc up` requests the mesh's processes from its own prefork server. A node agent requests its fork server
from the incubator.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence

_PID_BYTES = 32


async def fork_from(
    channel: socket.socket,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    *further: int,
) -> tuple[int, int]:
    """Request a child and let it start; return its pid and its pidfd, which the caller closes.

    Args:
        channel: A non-blocking socket to the server.
        arguments: The child's arguments.
        environment: The child's whole environment.
        output: The file descriptor for the child's output.
        further: More file descriptors that the child needs.

    Raises:
        OSError: The server could fork no child, or has ended.
    """
    loop = asyncio.get_running_loop()
    line = json.dumps([list(arguments), dict(environment)]).encode() + b"\n"
    start_reader, start_writer = os.pipe()
    try:
        sent = socket.send_fds(channel, [line], [output, start_reader, *further])
        if sent < len(line):  # to send nothing fails as well, if the server has answered and closed meanwhile
            await loop.sock_sendall(channel, line[sent:])
        readable = asyncio.Event()
        loop.add_reader(channel, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(channel)
        answer, handles, _, _ = socket.recv_fds(channel, _PID_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not handles:
            raise OSError("it could fork no child, or has ended")
        os.write(start_writer, b"+")
        return int(answer), handles[0]
    finally:
        os.close(start_reader)
        os.close(start_writer)
