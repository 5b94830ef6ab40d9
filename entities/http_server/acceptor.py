"""Takes connections from a listening socket, as many as there is room for.

asyncio's own way of it tries again thousands of times, with a line for each, when there are no file
descriptors left, waits a minute for a TLS handshake, and knows no limit.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from bus.logs import get_logger
from entities.http_server.connection_limits import OpenConnections

log = get_logger("door")

ACCEPTED = 64
"""Connections taken in one turn of the loop; the others wait in the kernel."""
TURNS = 8
"""In so many never more than may owe a request: who has asked is read before newcomers push it out."""
HANDSHAKE_S = 10.0
PAUSE_S = 0.1
"""Until the next try where one can't be taken."""
TOLD_S = 1.0
"""Between two lines about that."""


class Acceptor:
    """Of one socket. Each connection gets a protocol of its own; `tls`: after a handshake."""

    def __init__(
        self,
        sock: socket.socket,
        room: OpenConnections,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._room = room
        self._protocol = protocol
        self._tls = tls
        self._batch = max(1, min(ACCEPTED, room.bounds.waiting // TURNS))
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._untold = 0
        self._told_at = float("-inf")

    def start(self) -> None:
        self._later = None
        self._loop.add_reader(self._sock.fileno(), self._take)

    def stop(self) -> None:
        """Whoever comes now is no more our business; twice is fine."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())

    def _take(self) -> None:
        for _ in range(self._batch):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._can_not(error)
                return
            if not self._room.make_room():
                connection.close()
                self._tell("more connections than may be open at this door")
                continue
            connection.setblocking(False)
            self._room.greets(self._loop.create_task(self._greet(connection)))

    def _can_not(self, error: OSError) -> None:
        """No descriptors or no memory: the socket stays ready, and would be tried again without end. Whoever
        has owed a request for longest makes room."""
        self._tell(f"no connection can be taken: {error.strerror}")
        self._room.end_oldest()
        self._loop.remove_reader(self._sock.fileno())
        self._later = self._loop.call_later(PAUSE_S, self.start)

    def _tell(self, event: str) -> None:
        self._untold += 1
        if self._loop.time() - self._told_at >= TOLD_S:
            port = self._sock.getsockname()[1]
            log.warning(event, port=port, times=self._untold, open=len(self._room))
            self._untold, self._told_at = 0, self._loop.time()

    async def _greet(self, connection: socket.socket) -> None:
        """Into the protocol's hands."""
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            )
        except (OSError, TimeoutError):  # an SSLError, too: it speaks no TLS, or too slowly
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
