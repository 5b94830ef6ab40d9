"""Uvicorn inside a service's own event loop: one socket, no signal handlers, an orderly shutdown.

Imported only where a gateway has an HTTP API: FastAPI and uvicorn cost about 12 MB of memory.
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

from entities.http_server.acceptor import Acceptor
from entities.http_server.connection_limits import OpenConnections
from schemas.errors import BadInput

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
        """Installs no signal handlers: signals belong to the process, not to one of its services."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port. Raises `BadInput` with one line if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is given because asyncio disables Nagle's algorithm only for such sockets; otherwise the
    # second part of an answer would wait 40 ms for the acknowledgement of the first.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Here and not in uvicorn: two processes may bind, only one can listen, and the other must fail now.
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
    """The URL that others use: with `advertised_host`, else with `host` if that names one machine."""
    name = advertised_host or ("127.0.0.1" if host in _ANYWHERE else host)
    return f"{protocol}://{f'[{name}]' if ':' in name else name}:{sock.getsockname()[1]}"


def configured(
    app: ASGIApp,
    tls: tuple[Path, Path] | None = None,
    proxies: Sequence[str] = (),
    grace_s: int = 1,
) -> uvicorn.Config:
    """Uvicorn's configuration for `app`.

    Args:
        app: the ASGI application.
        tls: paths of certificate and key; None: plain HTTP.
        proxies: addresses or networks of proxies whose `X-Forwarded-For` is trusted; no other's is.
        grace_s: whole seconds from the end of the drain until open connections are closed.

    Raises:
        BadInput: with one line, if certificate and key can't be used.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http="auto",  # httptools, or h11 where httptools is not installed
        ws="none",
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_graceful_shutdown=grace_s,
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
    config: uvicorn.Config, sock: socket.socket, drain: Callable[[], Awaitable[None]], room: OpenConnections
) -> AsyncIterator[None]:
    """Serves on the socket for the length of the block; `drain` ends open requests before the server stops.

    `room`: the connections that the protocol of `config` reports to.
    """
    server = _Server(config)

    def protocol() -> asyncio.Protocol:
        # uvicorn types it as a class of protocols, which have no arguments in common
        connection: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        return connection

    acceptor = Acceptor(sock, room, protocol, config.ssl)
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
