"""A way to the bus that stops the server at a chosen moment: before a process's next message with some words.

What takes a fraction of a millisecond can't be hit from outside by looking on. So the process reaches its
server by way of this relay, which stops the server first, and hands on the message after.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import psutil

from tests.patience import PATIENCE_S


class Tripwire:
    """`with Tripwire(url, pid) as wire:`; `wire.url` leads to the server of `url`, process `pid()`."""

    def __init__(self, url: str, pid: Callable[[], int]) -> None:
        self._to = urlsplit(url)
        self._pid = pid
        self._words = b""
        self._tripped = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tripwire", daemon=True)
        self.url = ""

    def __enter__(self) -> Tripwire:
        self._thread.start()
        serving = asyncio.start_server(self._relay, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(PATIENCE_S)
        self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)

    def arm(self, words: str) -> None:
        """The next message with these words finds the server stopped."""
        self._tripped.clear()
        self._words = words.encode()

    async def tripped(self) -> None:
        """Returns once the server is stopped."""
        assert await asyncio.to_thread(self._tripped.wait, PATIENCE_S), f"never said: {self._words!r}"

    def release(self) -> None:
        os.kill(self._pid(), signal.SIGCONT)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._to.hostname, self._to.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._carry(reader, back, watched=True), self._carry(there, writer, watched=False)
        )

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, watched: bool
    ) -> None:
        before = b""
        try:
            while data := await reader.read(1 << 16):
                if watched and self._words and self._words in before + data:
                    self._words = b""
                    self._stop()
                before = data[-64:]
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def _stop(self) -> None:
        process = psutil.Process(self._pid())
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            pass
        self._tripped.set()
