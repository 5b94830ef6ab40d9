"""Requests to whichever of a mesh's gateways answers: repeated where that is safe, taken up where they broke.

Thin shell over `dmsc.client.http_protocol`, which decides; `AsyncClient` says what is asked.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx

from dmsc.client import http_protocol as door
from dmsc.client.sse import EventParser
from schemas.base import Message
from schemas.errors import InProgress, Overloaded, Unavailable
from schemas.pages import Page

M = TypeVar("M", bound=Message)
P = TypeVar("P", bound=Page)

CHUNK_BYTES = 1 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
PAGE = 500
"""Items asked for at once where all are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferProgress:
    """How far a transfer is. `total_bytes`: None where nobody knows."""

    name: str
    done_bytes: int
    total_bytes: int | None


OnProgress = Callable[[TransferProgress], None]


class Gateways:
    """One HTTP client for all of them; the one that answered last is asked first."""

    def __init__(
        self, urls: Sequence[str], token: str | None, *, timeout_s: float, patience_s: float
    ) -> None:
        self.urls = [each.rstrip("/") for each in urls]
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            headers=door.headers(token), timeout=door.timeout(timeout_s), verify=door.verify(self.urls)
        )

    async def close(self) -> None:
        await self._http.aclose()

    # --- one question ---------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Any:
        """JSON in and out, from the first gateway that answers.

        A POST carries an idempotency key, its caller's or one of its own, so that it may be repeated: at the
        next gateway where one broke, and after a while where one said when to come back. Gives up once each
        gateway has failed, or after `patience_s`.
        """
        headers = {"Idempotency-Key": key or secrets.token_hex(16)} if method == "POST" else {}
        query = {name: value for name, value in (params or {}).items() if value not in (None, "")}
        deadline = time.monotonic() + self._patience_s
        tries = max(2, len(self.urls))  # a kept connection may have been closed at the other end just now
        while True:
            try:
                response = await self._http.request(
                    method, self.urls[0] + path, json=body, params=query or None, headers=headers
                )
                door.raise_for(response)
                return response.json()
            except (httpx.TransportError, Unavailable, InProgress) as error:
                wait_s = self._before_next(error, method, bool(headers), deadline, tries)
                tries -= wait_s == 0
                await asyncio.sleep(wait_s)

    def _before_next(self, error: Exception, method: str, keyed: bool, deadline: float, tries: int) -> float:
        """Seconds until the next try; raises where there is none."""
        if door.may_repeat(method, keyed, error):
            if isinstance(error, Overloaded | InProgress):
                self._pass_over()
                wait_s = float(error.fields.get("retry_after_s", 1.0)) / len(self.urls)
                if time.monotonic() + wait_s <= deadline:
                    return wait_s
            elif tries > 1 and not (isinstance(error, Unavailable) and len(self.urls) == 1):
                self._pass_over()
                return 0.0
        raise door.unreachable(self.urls, error) from error

    async def pages(
        self, path: str, kind: type[P], params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[P]:
        """All pages of a list, one after the other."""
        cursor: str | None = None
        while True:
            asked = {"limit": PAGE, **(params or {}), "cursor": cursor}
            page = kind.model_validate(await self.ask("GET", path, params=asked))
            yield page
            cursor = page.next
            if cursor is None:
                return

    # --- streams --------------------------------------------------------------------------------------------

    async def follow(
        self,
        path: str,
        kind: type[M],
        start: int,
        params: Mapping[str, str] | None = None,
        over: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncGenerator[M, None]:
        """Each record of a stream once, from position `start`, over as many gateways as it takes.

        `over`: asked when a gateway ends the stream without a word: whether nothing more will come.
        """
        last, pause_s, broken_since = start - 1, FIRST_PAUSE_S, None
        while True:
            position = door.position(last)
            position["params"].update(params or {})
            taken_up = False
            try:
                async with self._http.stream(
                    "GET", self.urls[0] + path, timeout=door.STREAM_TIMEOUT, **position
                ) as response:
                    if response.is_error:
                        await response.aread()
                    door.raise_for(response)
                    parser = EventParser()
                    async for line in response.aiter_lines():
                        taken_up = taken_up or line in door.ENDING_LINES
                        found = door.next_record(parser, line, last, kind)
                        if found is not None:
                            last, record = found
                            pause_s, broken_since = FIRST_PAUSE_S, None
                            yield record
                if taken_up:
                    self._pass_over()
                elif over is not None and last >= start and await over():
                    return
            except (httpx.TransportError, Unavailable) as error:
                broken_since = broken_since or time.monotonic()
                self._pass_over()
                if time.monotonic() - broken_since > self._patience_s:
                    raise door.unreachable(self.urls, error) from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    # --- files ----------------------------------------------------------------------------------------------

    async def fetch(self, path: str, file: BinaryIO, name: str, progress: OnProgress | None) -> None:
        """A file's bytes; where a gateway breaks off, the rest comes from the next one."""
        done, total, broken_since = 0, None, None
        while True:
            headers = {"Range": f"bytes={done}-"} if done else {}
            try:
                async with self._http.stream(
                    "GET", self.urls[0] + path, timeout=door.STREAM_TIMEOUT, headers=headers
                ) as response:
                    if response.is_error:
                        await response.aread()
                    door.raise_for(response)
                    if done and response.status_code != 206:
                        done = 0
                        file.seek(0)
                        file.truncate()
                    length = response.headers.get("content-length")
                    total = done + int(length) if length is not None else None
                    async for chunk in response.aiter_bytes(CHUNK_BYTES):
                        file.write(chunk)
                        done += len(chunk)
                        broken_since = None
                        if progress is not None:
                            progress(TransferProgress(name=name, done_bytes=done, total_bytes=total))
                return
            except (httpx.TransportError, Unavailable) as error:
                broken_since = broken_since or time.monotonic()
                self._pass_over()
                if time.monotonic() - broken_since > min(self._patience_s, door.FILE_PATIENCE_S):
                    raise door.unreachable(self.urls, error) from error
                await asyncio.sleep(FIRST_PAUSE_S)

    async def send(self, path: str, source: Path | bytes, name: str, progress: OnProgress | None) -> Any:
        """PUTs a file or bytes: the same again, at the next gateway, where one broke off."""
        total = len(source) if isinstance(source, bytes) else await asyncio.to_thread(os.path.getsize, source)
        tries = max(2, len(self.urls))
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                response = await self._http.put(
                    self.urls[0] + path,
                    content=_pieces(source, name, total, progress),
                    headers={"Content-Length": str(total), "Content-Type": "application/octet-stream"},
                    timeout=door.STREAM_TIMEOUT,
                )
                door.raise_for(response)
                return response.json()
            except (httpx.TransportError, Unavailable) as error:
                wait_s = self._before_next(error, "PUT", True, deadline, tries)
                tries -= wait_s == 0
                await asyncio.sleep(wait_s)

    def _pass_over(self) -> None:
        self.urls.append(self.urls.pop(0))


async def _pieces(
    source: Path | bytes, name: str, total: int, progress: OnProgress | None
) -> AsyncIterator[bytes]:
    done = 0
    async for piece in _read(source):
        yield piece
        done += len(piece)
        if progress is not None:
            progress(TransferProgress(name=name, done_bytes=done, total_bytes=total))


async def _read(source: Path | bytes) -> AsyncIterator[bytes]:
    if isinstance(source, bytes):
        for offset in range(0, len(source), CHUNK_BYTES):
            yield source[offset : offset + CHUNK_BYTES]
        return
    with await asyncio.to_thread(source.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield piece
