"""Accepts connections from a listening socket, as many as the limits allow.

asyncio's own accept loop retries thousands of times, with a log line each, when no file descriptors are left,
waits a minute for a TLS handshake, and has no limit.
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
"""Most connections accepted in one turn of the event loop; the others wait in the kernel."""
TURNS = 8
"""It takes at least this many turns to accept as many connections as may wait for a request: so a request
that has arrived is read before new connections evict its connection."""


class Acceptor:
    """Accepts from one socket. Each connection gets its own protocol, with `tls` after a handshake."""

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
        self._retry: asyncio.TimerHandle | None = None
        self._unlogged = 0
        self._logged_at = float("-inf")

    def start(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more connections; a second call does nothing."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        for _ in range(self._batch):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            if not self._room.make_room():
                connection.close()
                self._warn("more connections than may be open at this door")
                continue
            connection.setblocking(False)
            self._room.greets(self._loop.create_task(self._handshake(connection)))

    def _pause(self, error: OSError) -> None:
        """Handle a lack of descriptors or memory: drop the longest-waiting connection and pause.

        Without a pause the socket would stay readable and accepting would be retried without end.
        """
        self._warn(f"no connection can be taken: {error.strerror}")
        self._room.end_oldest()
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(self._room.bounds.accept_again_s, self.start)

    def _warn(self, event: str) -> None:
        self._unlogged += 1
        if self._loop.time() - self._logged_at >= self._room.bounds.log_every_s:
            port = self._sock.getsockname()[1]
            log.warning(event, port=port, times=self._unlogged, open=len(self._room))
            self._unlogged, self._logged_at = 0, self._loop.time()

    async def _handshake(self, connection: socket.socket) -> None:
        """Do the TLS handshake, if any, and hand the connection to its protocol."""
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._room.bounds.handshake_s,
            )
        except (OSError, TimeoutError):  # includes SSLError: the client speaks no TLS, or is too slow
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
