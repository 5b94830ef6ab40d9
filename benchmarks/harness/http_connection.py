"""An HTTP client that costs little: one kept connection, no parsing but of status and length."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes = b""


class Connection:
    """One kept HTTP/1.1 connection; answers have a Content-Length."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, token: str = "", body: bytes = b"") -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._place.hostname, self._place.port)
        reader, writer = self._streams
        try:
            writer.write(request(method, path, token, body))
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            answer = Answer(int(head[9:12]), await reader.readexactly(int(length[1]) if length else 0))
            if b"connection: close" in head.lower():
                self.close()
            return answer
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return Answer(0)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request(method: str, path: str, token: str = "", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"Content-Length: {len(body)}"]
    if body:
        lines.append("Content-Type: application/json")
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def once(url: str, method: str, path: str, token: str = "", body: bytes = b"") -> Answer:
    connection = Connection(url)
    try:
        return await connection.ask(method, path, token, body)
    except OSError:
        return Answer(0)
    finally:
        connection.close()
