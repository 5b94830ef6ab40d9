"""A way to a gateway that a test can cut and mend: a TCP proxy on a port of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class SeverableProxy:
    """`with SeverableProxy("http://127.0.0.1:8080") as proxy: … proxy.url … proxy.cut() … proxy.mend()`"""

    def __init__(self, url: str) -> None:
        there = urlsplit(url)
        self._there = (there.hostname or "", there.port or 80)
        self._ends: list[socket.socket] = []
        self._whole = True
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def cut(self) -> None:
        """Everything that is open breaks, and what is new is hung up on."""
        self._whole = False
        ends, self._ends = self._ends, []
        for end in ends:
            _hang_up(end)

    def mend(self) -> None:
        self._whole = True

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._door.accept()
            except OSError:
                return
            if not self._whole:
                here.close()
                continue
            there = socket.create_connection(self._there)
            self._ends += [here, there]
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=_carry, args=(source, sink), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        _hang_up(end)


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
