"""The server's own protocol, for asking it hundreds of times a second what somebody may do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bus.security.credentials import present
from bus.security.identity import is_credential, is_root
from schemas.envelope import EntityKind
from schemas.limits import CALLOUT_UNANSWERED_S
from tests.patience import PATIENCE_S

DENIAL = re.compile(rb"-ERR 'Permissions Violation for (Publish|Subscription) to \"([^\"]+)\"")


class Shut(Exception):
    """The server does not let us in; its last line."""


@dataclass
class RawConnection:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    numbers: int = 0

    async def denied(self, *, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> set[str]:
        """Which of these subjects the server refuses. Messages are empty; subscriptions are ended again."""
        for subject in publish:
            self.writer.write(f"PUB {subject} 0\r\n\r\n".encode())
        for subject in subscribe:
            self.numbers += 1
            self.writer.write(f"SUB {subject} {self.numbers}\r\nUNSUB {self.numbers}\r\n".encode())
        return {match.group(2).decode() for line in await self.until_pong() if (match := DENIAL.match(line))}

    async def until_pong(self) -> list[bytes]:
        """All lines up to the answer to our PING, which the server gives behind everything before."""
        self.writer.write(b"PING\r\n")
        lines = []
        async with asyncio.timeout(PATIENCE_S):
            while (line := await self.reader.readline()) != b"PONG\r\n":
                if not line:
                    raise Shut(lines[-1].decode() if lines else "")
                lines.append(line)
        return lines


@contextlib.asynccontextmanager
async def let_in(url: str, token: str) -> AsyncIterator[RawConnection]:
    """Comes in as our clients do: a refusal that no authorizer has given in time is not the last word.

    Raises:
        Shut: an authorizer refused.
    """
    async with AsyncExitStack() as stack:
        while True:
            began = time.monotonic()
            try:
                connection = await stack.enter_async_context(raw_connection(url, token))
                break
            except Shut:
                if time.monotonic() - began < CALLOUT_UNANSWERED_S:
                    raise
        yield connection


@contextlib.asynccontextmanager
async def raw_connection(
    url: str, token: str, name: str = "wire", kind: EntityKind = EntityKind.CLIENT, **options: Any
) -> AsyncIterator[RawConnection]:
    """Comes in with a credential, a root or a user's token. `options` replace what is said in CONNECT.

    Raises:
        Shut: refused.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    try:
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        said: dict[str, Any] = {"verbose": False, "lang": "test", "version": "0", "name": f"{name}/0"}
        if is_root(token) or is_credential(token):
            shown = present(token, name, kind)
            said |= {"auth_token": shown.chain, "sig": shown.sign(info["nonce"]).decode()}
        else:
            said["auth_token"] = token
        said |= {key: value for key, value in options.items() if key != "said"}
        options.get("said", {}).update(said)
        writer.write(f"CONNECT {json.dumps(said)}\r\n".encode())
        connection = RawConnection(reader, writer)
        try:
            for line in await connection.until_pong():
                if line.startswith(b"-ERR"):
                    raise Shut(line.decode())
        except ConnectionError:
            raise Shut("connection reset") from None
        yield connection
    finally:
        writer.close()
