"""How many have asked so far, at a port of this machine: what a model can reach that may reach no file."""

from __future__ import annotations

import collections
import itertools
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar


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


class Meetings(socketserver.ThreadingTCPServer):
    """Answers each line with how often it came before."""

    daemon_threads = True

    def __init__(self) -> None:
        self.seen: collections.Counter[bytes] = collections.Counter()
        super().__init__(("127.0.0.1", 0), _Known)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Known(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Meetings)
        line = self.rfile.readline()
        self.wfile.write(f"{self.server.seen[line]}\n".encode())
        self.server.seen[line] += 1


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Counter)
        self.request.sendall(f"{self.server.count()}\n".encode())


S = TypeVar("S", bound=socketserver.BaseServer)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Until the end of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
