"""A web server on loopback that answers range requests, counts them, and fails as it is told."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RangeServer:
    """Files by path. `failures` answers are 503 first; `ranges` False: it answers with whole files; `etags`
    False: it tells no state of a file. `delay` is called with path and range before each answer, on a thread
    of its own, and takes as long as it likes; if it returns True, the answer is 503."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent_bytes = 0
        self.failures = 0
        self.ranges = True
        self.etags = True
        self.delay: Callable[[str, str], bool] = lambda path, span: False
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""
        self._lock = threading.Lock()

    def data_requests(self) -> list[tuple[str, str]]:
        """Those for more than the first byte."""
        return [request for request in self.requests if request[1] != "bytes=0-0"]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.lstrip("/")
        span = request.headers.get("Range", "")
        self.gate.wait()
        late = self.delay(path, span)
        with self._lock:
            fails, self.failures = late or self.failures > 0, max(0, self.failures - 1)
            if not fails:
                self.requests.append((path, span))
        data = self.files.get(path)
        if fails or data is None:
            request.send_error(503 if fails else 404)
            return
        state = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'} if self.etags else {}
        if not self.ranges or not span:
            self._send(request, 200, data, state)
            return
        first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
        if first >= len(data):
            self._send(request, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        part = data[first : last + 1]
        where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        self._send(request, 206, part, {**state, "Content-Range": where})

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)
        with self._lock:
            self.sent_bytes += len(data)


@contextmanager
def range_server() -> Iterator[RangeServer]:
    """A server until the end of the block."""
    state = RangeServer()
    with served(state.answer, "GET") as state.url:
        try:
            yield state
        finally:
            state.gate.set()


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler], None], *methods: str) -> Iterator[str]:
    """A web server on loopback that answers requests of these methods until the end of the block; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body in one packet: else the other end waits to acknowledge

        def log_message(self, *arguments: Any) -> None:
            pass

    for method in methods:
        setattr(Handler, f"do_{method}", lambda request: answer(request))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
