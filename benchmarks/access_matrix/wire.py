"""A connection to the server by its own text protocol: an attacker does nothing as our clients do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bus.security.credentials import present
from bus.security.identity import is_credential, is_root
from schemas.envelope import EntityKind

PATIENCE_S = 60.0
"""For answers that are certain to come."""
NOT_PERMITTED = re.compile(r"Permissions Violation for (Publish|Subscription) to \"([^\"]+)\"")


class Shut(Exception):
    """The server does not let us in, or has thrown us out; its last line."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message as it goes to the server."""

    subject: str
    payload: bytes = b""
    reply: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def frame(self) -> bytes:
        reply = f" {self.reply}" if self.reply else ""
        if not self.headers:
            line = f"PUB {self.subject}{reply} {len(self.payload)}\r\n"
            return line.encode() + self.payload + b"\r\n"
        head = "NATS/1.0\r\n" + "".join(f"{key}: {value}\r\n" for key, value in self.headers) + "\r\n"
        total = len(head) + len(self.payload)
        line = f"HPUB {self.subject}{reply} {len(head)} {total}\r\n"
        return line.encode() + head.encode() + self.payload + b"\r\n"


@dataclass(frozen=True, slots=True)
class Heard:
    """One message as it came: `head` is the block of headers."""

    subject: str
    reply: str
    payload: bytes
    head: bytes = b""


@dataclass
class Wire:
    """One connection. `heard` and `denied` fill by themselves; whoever reads them empties them."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: list[Heard] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)
    ended: str | None = None
    _pongs: list[asyncio.Future[None]] = field(default_factory=list)
    _numbers: int = 0

    def say(self, *messages: Said) -> None:
        self.writer.write(b"".join(message.frame() for message in messages))

    def listen(self, pattern: str) -> int:
        self._numbers += 1
        self.writer.write(f"SUB {pattern} {self._numbers}\r\n".encode())
        return self._numbers

    def end(self, numbers: Iterable[int]) -> None:
        self.writer.write("".join(f"UNSUB {number}\r\n" for number in numbers).encode())

    async def flush(self) -> None:
        """All that was said has been handled by the server, and what it said before has been read.

        Raises:
            Shut: the server ended the connection.
        """
        if self.ended is not None:
            raise Shut(self.ended)
        pong = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self.writer.write(b"PING\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await pong

    async def answers(self, inboxes: Iterable[str]) -> dict[str, bytes]:
        """One for each of these inboxes, which are listened to; what else is heard meanwhile is let go."""
        waiting, found = set(inboxes), dict[str, bytes]()
        async with asyncio.timeout(PATIENCE_S):
            while waiting:
                await self.flush()
                for message in self.heard:
                    if message.subject in waiting:
                        waiting.remove(message.subject)
                        found[message.subject] = message.payload
                self.heard.clear()
        return found

    async def lists(self, inboxes: Iterable[str]) -> dict[str, list[Heard]]:
        """All that is read directly, for each of these inboxes, up to the server's word that this is all.
        What else is heard meanwhile is let go."""
        found: dict[str, list[Heard]] = {inbox: [] for inbox in inboxes}
        waiting = set(found)
        async with asyncio.timeout(PATIENCE_S):
            while waiting:
                await self.flush()
                for message in self.heard:
                    if message.subject in waiting:
                        if message.head.startswith(b"NATS/1.0 "):  # a status: end of the batch, nothing there
                            waiting.remove(message.subject)
                        else:
                            found[message.subject].append(message)
                self.heard.clear()
        return found

    async def ask(self, subject: str, payload: bytes, inbox: str) -> bytes:
        """One answer; `inbox` is listened to already."""
        self.say(Said(subject, payload, inbox))
        return (await self.answers([inbox]))[inbox]

    # --- reading -------------------------------------------------------------------------------------------

    async def read(self) -> None:
        last = ""
        try:
            while line := await self.reader.readline():
                if line.startswith((b"MSG ", b"HMSG ")):
                    self.heard.append(await self._message(line.decode().split()))
                elif line.startswith(b"PONG"):
                    if self._pongs:
                        self._pongs.pop(0).set_result(None)
                elif line.startswith(b"PING"):
                    self.writer.write(b"PONG\r\n")
                elif line.startswith(b"-ERR"):
                    last = line.decode(errors="replace").strip()
                    if (found := NOT_PERMITTED.search(last)) is not None:
                        self.denied.append(found.group(2))
        except ConnectionError as error:
            last = last or str(error)
        self.ended = last
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(Shut(last))
        self._pongs.clear()

    async def _message(self, words: list[str]) -> Heard:
        with_head = words[0] == "HMSG"
        sizes = int(words[-2]) if with_head else 0
        content = await self.reader.readexactly(int(words[-1]) + 2)
        fixed = 5 if with_head else 4
        reply = words[3] if len(words) > fixed else ""
        return Heard(words[1], reply, content[sizes:-2], content[:sizes])


@contextlib.asynccontextmanager
async def wire(
    url: str, token: str, name: str = "wire", kind: EntityKind = EntityKind.CLIENT
) -> AsyncIterator[Wire]:
    """Comes in with a credential, a root or a user's token.

    Raises:
        Shut: refused.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=64 << 20)
    info: Mapping[str, Any] = json.loads((await reader.readline()).removeprefix(b"INFO "))
    said: dict[str, Any] = {
        "verbose": False,
        "lang": "wire",
        "version": "0",
        "name": f"{name}/0",
        "headers": True,
        "no_responders": True,
    }
    if is_root(token) or is_credential(token):
        shown = present(token, name, kind)
        said |= {"auth_token": shown.chain, "sig": shown.sign(info["nonce"]).decode()}
    else:
        said["auth_token"] = token
    writer.write(f"CONNECT {json.dumps(said)}\r\n".encode())
    connection = Wire(reader, writer)
    reading = asyncio.create_task(connection.read())
    try:
        await connection.flush()
        yield connection
    finally:
        writer.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
