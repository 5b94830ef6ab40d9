"""Serves `GET /metrics` and `GET /healthz` at a port of its own, for processes without an HTTP API.

It is a small HTTP/1.1 server on the process's own event loop. FastAPI and uvicorn would cost each process 12
MB; the client library's server would read, on its own thread, what the loop is changing. A connection carries
one request. Connections are limited like those of a gateway's HTTP API, so that idle connections can't keep a
scraper out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus.logs import get_logger
from bus.tasks import cancel
from entities.http_server.acceptor import Acceptor
from entities.http_server.connection_limits import LATE, LONG, ConnectionBounds, OpenConnections
from entities.metrics import Render
from schemas.errors import BadInput

log = get_logger("metrics")

HEAD_BYTES = 16_384
BOUNDS = ConnectionBounds(connections=48, waiting=32, head_s=5.0, answer_s=10.0)
"""Few connections suffice: a page of a large mesh has megabytes, and a scraper needs one connection."""
BACKLOG = 128


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Where a process serves its metrics.

    `port` 0 means any free port. `host` is the address at which others reach `bind`.
    """

    port: int = 0
    bind: str = "127.0.0.1"  # no token is needed; 0.0.0.0 shows names of jobs and nodes to the network
    host: str = "127.0.0.1"


@asynccontextmanager
async def listening(
    options: MetricsOptions, render: Render, bounds: ConnectionBounds = BOUNDS
) -> AsyncIterator[str]:
    """Serve metrics for the block; yield the URL.

    Metrics never prevent a service from running: if the port is taken, a free one is used and logged.
    """
    sock = _bound(options)
    room = OpenConnections(bounds)
    scrapes: set[_Scrape] = set()
    acceptor = Acceptor(sock, room, lambda: _Scrape(room, render, scrapes))
    acceptor.start()
    try:
        port = sock.getsockname()[1]
        yield f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}/metrics"
    finally:
        acceptor.stop()
        room.close()
        await asyncio.gather(*(scrape.end() for scrape in tuple(scrapes)))
        sock.close()


class _Scrape(asyncio.Protocol):
    """One connection: one request, one answer, then it closes."""

    def __init__(self, room: OpenConnections, render: Render, open_now: set[_Scrape]) -> None:
        self._room = room
        self._render = render
        self._open_now = open_now
        self._head = b""
        self._asked_at = 0.0
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open_now.add(self)
        self._room.owes(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.ended(self)
        self._open_now.discard(self)
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        if self._answering is not None or self._transport.is_closing():
            return
        self._head += data
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if len(head) > HEAD_BYTES:
            self._room.end(self, "length")
        elif end:
            loop = asyncio.get_running_loop()
            self._room.asks(self)
            self._asked_at = loop.time()
            self._answering = loop.create_task(self._answer(head.decode("latin-1")))

    def eof_received(self) -> bool:
        """Keep the connection for the answer if the client closes its sending side after its request."""
        return self._answering is not None

    async def _answer(self, head: str) -> None:
        try:
            answer = await _answered(head, self._render)
        except Exception:
            log.exception("a page of metrics could not be made")
            answer = _response("500 Internal Server Error", b"see the log\n")
        self._transport.write(answer)
        self._transport.close()
        self._room.owes(self)  # the client must now read in time, and a waiting request may displace it

    async def end(self) -> None:
        self._transport.abort()
        await cancel(self._answering)

    # --- what the room asks ---------------------------------------------------------------------------------
    def lateness(self, now: float, bounds: ConnectionBounds) -> str:
        return "answer" if now - self._asked_at > bounds.answer_s else ""

    def is_sending(self) -> bool:
        return bool(self._transport.get_write_buffer_size())

    def cut(self, why: str) -> None:
        if why in ("head", "length") and self._head and not self._transport.is_closing():
            self._transport.write(LONG if why == "length" else LATE)
            self._transport.close()
        else:
            self._transport.abort()


def _bound(options: MetricsOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.bind else socket.AF_INET
    for port in (options.port, 0):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((options.bind, port))
            sock.listen(BACKLOG)  # two sockets may be bound to the port, but only one can listen
        except OSError as error:
            sock.close()
            if port == 0:
                where = f"{options.bind}: {error.strerror}"
                raise BadInput(f"metrics can't be told at {where}; choose another --metrics-bind") from None
            log.warning("metrics port not to be had, using a free one", port=port, reason=error.strerror)
            continue
        sock.setblocking(False)
        return sock
    raise AssertionError("unreachable")


async def _answered(head: str, render: Render) -> bytes:
    request, *lines = head.split("\r\n")
    method, _, rest = request.partition(" ")
    path = rest.split(" ")[0].split("?")[0]
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", b"GET /metrics\n")
    if path == "/healthz":  # it is answered by the loop on which the services run
        return _response("200 OK", b"ok\n", with_body=method == "GET")
    if path != "/metrics":
        return _response("404 Not Found", b"GET /metrics\n")
    body, content_type = await render(headers.get("accept", ""))
    return _response("200 OK", body, content_type, with_body=method == "GET")


def _response(
    status: str, body: bytes, content_type: str = "text/plain; charset=utf-8", *, with_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
