"""Uvicorn inside a service's own event loop: one socket, no signal handlers, an orderly end.

Connections are accepted here: asyncio's own way of it tries again two thousand times, with a line for each,
when there are no file descriptors left, waits a minute for a TLS handshake, and knows no limit.

Imported only where a gateway has an HTTP door: FastAPI and uvicorn cost about 12 MB of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from bus.logs import get_logger
from entities.gateway.connections import Connections
from schemas.errors import BadInput

log = get_logger("door")

ACCEPTED = 64
"""Connections taken in one turn of the loop; the others wait in the kernel."""
HANDSHAKE_S = 10.0
PAUSE_S = 0.1
"""Until the next try where one can't be taken."""
TOLD_S = 1.0
"""Between two lines about that."""
GRACE_S = 1  # whole seconds from the end of the drain until what is still open is cut off
BACKLOG = 1024
_ANYWHERE = {"0.0.0.0", "::", ""}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the business of whoever runs the loop, not of one of its services."""
        yield


class _Acceptor:
    """Takes connections from the socket, as many as there is room for."""

    def __init__(
        self, sock: socket.socket, config: uvicorn.Config, server: _Server, room: Connections
    ) -> None:
        self._sock = sock
        self._config = config
        self._server = server
        self._room = room
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
        for _ in range(ACCEPTED):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._can_not(error)
                return
            if not self._room.make_room():
                connection.close()
                self._tell("more connections than this gateway may have open")
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
            log.warning(event, times=self._untold, open=len(self._room))
            self._untold, self._told_at = 0, self._loop.time()

    async def _greet(self, connection: socket.socket) -> None:
        """Into the protocol's hands, after a TLS handshake where there is one."""
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._config.ssl,
                ssl_handshake_timeout=None if self._config.ssl is None else HANDSHAKE_S,
            )
        except (OSError, TimeoutError):  # an SSLError, too: it speaks no TLS, or too slowly
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self._config.http_protocol_class(  # type: ignore[call-arg]
            config=self._config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
            _loop=self._loop,
        )
        return made


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any free one. Raises `BadInput` with one line where it can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio takes Nagle's algorithm off only such connections, and the second part of an
    # answer would wait 40 ms for the acknowledgement of the first.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Here and not in uvicorn: two may bind, only one can listen, and the other must hear it now.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"HTTP port {port} on {host} is taken; choose another, or 0 for any free one"
        elif error.errno == errno.EACCES:
            text = f"HTTP port {port} on {host} needs privileges; choose one from 1024 up"
        else:
            text = f"HTTP address {host}:{port} can't be used: {error.strerror}"
        raise BadInput(text, host=host, port=port) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket, host: str, advertised_host: str = "", protocol: str = "http") -> str:
    """The URL to tell others: `advertised_host`, or `host` where that names one machine."""
    name = advertised_host or ("127.0.0.1" if host in _ANYWHERE else host)
    return f"{protocol}://{f'[{name}]' if ':' in name else name}:{sock.getsockname()[1]}"


def configured(
    app: ASGIApp, tls: tuple[Path, Path] | None = None, proxies: Sequence[str] = ()
) -> uvicorn.Config:
    """How `app` is served. `tls`: certificate and key; None: plain HTTP. `proxies`: addresses or networks of
    those whose word on a client's address counts (`X-Forwarded-For`); nobody else's does.

    Raises `BadInput` with one line where these can't be used.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http="auto",  # httptools, and h11 where that is not
        ws="none",
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=None if tls is None else str(tls[0]),
        ssl_keyfile=None if tls is None else str(tls[1]),
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        assert tls is not None
        why = "not a certificate and its key" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadInput(f"HTTPS: {tls[0]}, {tls[1]}: {why}; see `dmsc cert`") from None
    return config


@contextlib.asynccontextmanager
async def serving(
    config: uvicorn.Config, sock: socket.socket, drain: Callable[[], Awaitable[None]], room: Connections
) -> AsyncIterator[None]:
    """Serve on the socket for the length of the block; `drain` ends what is open before it stops.

    `room`: what the protocol of `config` tells of its connections.
    """
    server = _Server(config)
    acceptor = _Acceptor(sock, config, server, room)
    task = asyncio.create_task(server.serve(sockets=[]), name="http")
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            raise BadInput("the HTTP server ended while starting")
        acceptor.start()
        yield
    finally:
        listening.cancel()
        try:
            if not task.done():
                await drain()
        finally:
            acceptor.stop()
            room.close()
            server.should_exit = True
        await asyncio.wait({task})
        sock.close()
