"""How many have asked so far, at a port of this machine: what a model can reach that may reach no file."""

from __future__ import annotations

import itertools
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Counter(socketserver.ThreadingTCPServer):
    """Answers each connection with how many there were before."""

    daemon_threads = True

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.met = 0
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def count(self) -> int:
        number = next(self._numbers)
        self.met = number + 1
        return number


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Counter)
        self.request.sendall(f"{self.server.count()}\n".encode())


@contextmanager
def counter() -> Iterator[Counter]:
    with Counter() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
