"""`GET /metrics` at a port of its own, for processes without an HTTP door.

A few lines of HTTP/1.1 on the process's own event loop: FastAPI and uvicorn would cost each of them 12 MB,
the client library's server a thread that reads what the loop is changing. A connection is one request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus.logs import get_logger
from entities.metrics import Render
from schemas.errors import BadInput

log = get_logger("metrics")

HEAD_BYTES = 16_384
REQUEST_S = 5.0
"""How long a request may take to arrive, and its answer to leave."""
CONNECTIONS = 16
"""At a time; more are closed at once."""
BACKLOG = 16


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Where a process tells its metrics. `port` 0: any free one. `host`: how others reach what is bound."""

    port: int = 0
    bind: str = "127.0.0.1"  # they need no token here; 0.0.0.0 shows names of jobs and nodes to the network
    host: str = "127.0.0.1"


@asynccontextmanager
async def listening(options: MetricsOptions, render: Render) -> AsyncIterator[str]:
    """Serves for the length of the block; gives the URL.

    Metrics never keep a service from running: where the port is taken a free one is used, and said.
    """
    sock = _bound(options)
    open_now: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        try:
            if len(open_now) <= CONNECTIONS:
                async with asyncio.timeout(REQUEST_S):
                    writer.write(await _answer(reader, render))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or is too slow
        finally:
            open_now.discard(task)
            writer.close()

    server = await asyncio.start_server(answer, sock=sock, limit=HEAD_BYTES, backlog=BACKLOG)
    try:
        port = sock.getsockname()[1]
        yield f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}/metrics"
    finally:
        server.close()
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)


def _bound(options: MetricsOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.bind else socket.AF_INET
    for port in (options.port, 0):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((options.bind, port))
            sock.listen(BACKLOG)  # two may bind, only one can listen
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


async def _answer(reader: asyncio.StreamReader, render: Render) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request, *lines = head.split("\r\n")
    method, _, rest = request.partition(" ")
    path = rest.split(" ")[0].split("?")[0]
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", b"GET /metrics\n")
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
