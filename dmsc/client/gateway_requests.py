"""Sends requests to whichever of a mesh's gateways answers, repeats them if that is safe, and resumes
streams.

This is a thin shell over `dmsc.client.http_protocol`, which makes the decisions. `AsyncClient` composes the
requests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx
from pydantic import BaseModel

from dmsc.client import http_protocol
from dmsc.client.http_protocol import EventParser
from schemas.base import Message
from schemas.errors import BusUnreachable, InProgress, NotFound, Overloaded, Unavailable
from schemas.pages import Page

A = TypeVar("A", bound=BaseModel)
M = TypeVar("M", bound=Message)
P = TypeVar("P", bound=Page)

CHUNK_BYTES = 1 << 20
PAGE = 500
"""Items per page when a whole list is fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferProgress:
    """The progress of a transfer. `total_bytes` is None if the size is unknown."""

    name: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RetryTimes:
    """The pauses before a broken transfer is continued, and how long that is tried."""

    first_pause_s: float = 0.2
    longest_pause_s: float = 2.0
    lost_bus_s: float = 6.0
    """For which a gateway that has lost its bus is asked again: a server restarts in that time."""
    file_s: float = 10.0
    """For which a broken download is retried before it fails, each time it breaks."""


OnProgress = Callable[[TransferProgress], None]


class Gateways:
    """One HTTP client for all gateways; the gateway that answered last is asked first."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None,
        *,
        timeout_s: float,
        patience_s: float,
        retry: RetryTimes = RetryTimes(),
    ) -> None:
        self._retry = retry
        self.urls = [url.rstrip("/") for url in urls]
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            headers=http_protocol.headers(token),
            timeout=http_protocol.timeout(timeout_s),
            verify=http_protocol.verify(self.urls),
        )

    async def close(self) -> None:
        await self._http.aclose()

    # --- one request ----------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Any:
        """Send a request with a JSON body and return the JSON answer of the first gateway that answers.

        A POST carries an idempotency key (the caller's or a random one), so it may be repeated: at the next
        gateway if one failed, or after a while if one said when to retry. It gives up when each gateway has
        failed, when none has found its bus again for `RetryTimes.lost_bus_s`, or after `patience_s`.
        """
        headers = {"Idempotency-Key": key or secrets.token_hex(16)} if method == "POST" else {}
        query = {name: value for name, value in (params or {}).items() if value not in (None, "")}

        def send() -> Awaitable[httpx.Response]:
            return self._http.request(
                method, self.urls[0] + path, json=body, params=query or None, headers=headers
            )

        return await self._answer(send, method, keyed=bool(headers))

    async def post_bytes(self, path: str, body: bytes, key: str | None = None) -> Any:
        """Send lines of JSON with POST, as `ask` does; return the JSON answer."""
        headers = {
            "Idempotency-Key": key or secrets.token_hex(16),
            "Content-Type": "application/x-ndjson",
        }

        def send() -> Awaitable[httpx.Response]:
            return self._http.post(self.urls[0] + path, content=body, headers=headers)

        return await self._answer(send, "POST", keyed=True)

    async def post_file(
        self, path: str, source: Path | bytes, name: str, fields: Mapping[str, str], key: str | None = None
    ) -> Any:
        """Send a form with a file and some fields with POST, as `ask` does; return the JSON answer."""
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}

        async def send() -> httpx.Response:
            data = source if isinstance(source, bytes) else await asyncio.to_thread(source.read_bytes)
            return await self._http.post(
                self.urls[0] + path,
                files={"file": (name, data)},
                data=dict(fields),
                headers=headers,
                timeout=http_protocol.STREAM_TIMEOUT,
            )

        return await self._answer(send, "POST", keyed=True)

    async def _answer(
        self, send: Callable[[], Awaitable[httpx.Response]], method: str, *, keyed: bool
    ) -> Any:
        """The JSON answer to a request, which is sent again while it may be."""
        began = time.monotonic()
        tries = max(2, len(self.urls))  # an idle connection may just have been closed by the gateway
        while True:
            asked = self.urls[0]
            try:
                response = await send()
                http_protocol.raise_for(response)
                return response.json()
            except (httpx.TransportError, Unavailable, InProgress) as error:
                wait_s = self._before_next(error, asked, method, keyed, began, tries)
                tries -= wait_s == 0
                await asyncio.sleep(wait_s)

    async def ask_for(
        self,
        kind: type[A],
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> A:
        """Send a request as `ask` does, and return its answer as this model."""
        return kind.model_validate(await self.ask(method, path, body, params=params, key=key))

    def _before_next(
        self, error: Exception, asked: str, method: str, keyed: bool, began: float, tries: int
    ) -> float:
        """Return the seconds until the next attempt; raise the error if there is none."""
        if http_protocol.may_repeat(method, keyed, error):
            if isinstance(error, Overloaded | InProgress | BusUnreachable):
                self._next_gateway(asked)
                wait_s = float(error.fields.get("retry_after_s", 1.0)) / len(self.urls)
                patience_s = self._patience_s
                if isinstance(error, BusUnreachable):
                    patience_s = min(patience_s, self._retry.lost_bus_s)
                if time.monotonic() + wait_s <= began + patience_s:
                    return wait_s
            elif tries > 1 and not (isinstance(error, Unavailable) and len(self.urls) == 1):
                self._next_gateway(asked)
                return 0.0
        raise http_protocol.unreachable(self.urls, error) from error

    async def pages(
        self, path: str, kind: type[P], params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[P]:
        """Fetch all pages of a list, one after the other."""
        cursor: str | None = None
        while True:
            query = {"limit": PAGE, **(params or {}), "cursor": cursor}
            page = await self.ask_for(kind, "GET", path, params=query)
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
        """Yield each record of a stream once, from position `start`, from any of the gateways.

        `over` is called when a gateway ends the stream without a reason; it returns whether nothing more will
        come.
        """
        last, pause_s, broken_since = start - 1, self._retry.first_pause_s, None
        while True:
            position = http_protocol.position(last)
            position["params"].update(params or {})
            resumable, asked = False, self.urls[0]
            try:
                async with self._stream(path, **position) as response:
                    parser = EventParser()
                    async for line in response.aiter_lines():
                        resumable = resumable or line in http_protocol.ENDING_LINES
                        item = http_protocol.next_record(parser, line, last, kind)
                        if item is not None:
                            last, record = item
                            pause_s, broken_since = self._retry.first_pause_s, None
                            yield record
                if resumable:
                    self._next_gateway(asked)
                elif over is not None and last >= start and await over():
                    return
            except (httpx.TransportError, Unavailable) as error:
                broken_since = self._broken(error, asked, broken_since, self._patience_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._retry.longest_pause_s)

    async def answer(
        self, path: str, body: Any, resumed: str, header: str, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the data of an answer's events once each, in order, whichever gateways die meanwhile.

        `header` names the answer; `headers` go with the request. `resumed` is the path, with `{id}` for that
        name, at which any gateway goes on with it. Where none knows it any more the request is sent again,
        under the same idempotency key: its events are the same.
        """
        last, name, pause_s, broken_since = 0, "", self._retry.first_pause_s, None
        key = secrets.token_hex(16)
        while True:
            how: dict[str, Any]
            asked = self.urls[0]
            if name:
                how = {"method": "GET", "url": asked + resumed.format(id=name)}
                sent = {"Last-Event-ID": str(last)}
            else:
                how = {"method": "POST", "url": asked + path, "json": body}
                sent = {"Idempotency-Key": key, **(headers or {})}
            try:
                async with self._http.stream(
                    **how, headers=sent, timeout=http_protocol.STREAM_TIMEOUT
                ) as response:
                    if response.is_error:
                        await response.aread()
                    http_protocol.raise_for(response)
                    name = response.headers.get(header, name)
                    parser = EventParser()
                    async for line in response.aiter_lines():
                        event = http_protocol.next_piece(parser, line)
                        if event is None:
                            continue
                        if event.data == http_protocol.DONE:
                            return
                        number = int(event.id or 0)
                        if number > last:
                            last, pause_s, broken_since = number, self._retry.first_pause_s, None
                            yield event.data
                self._next_gateway(asked)  # it stops, or another one has taken over
            except NotFound:
                if not name:
                    raise
                name = ""
            except (httpx.TransportError, Unavailable) as error:
                broken_since = self._broken(error, asked, broken_since, self._patience_s)
                if isinstance(error, Overloaded):
                    pause_s = float(error.fields.get("retry_after_s", pause_s))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._retry.longest_pause_s)

    # --- files ----------------------------------------------------------------------------------------------

    async def fetch(self, path: str, file: BinaryIO, name: str, progress: OnProgress | None) -> None:
        """Download a file. If a gateway breaks off, the rest is fetched from the next one."""
        done, total, broken_since = 0, None, None
        while True:
            asked = self.urls[0]
            headers = {"Range": f"bytes={done}-"} if done else {}
            try:
                async with self._stream(path, headers=headers) as response:
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
                broken_since = self._broken(
                    error, asked, broken_since, min(self._patience_s, self._retry.file_s)
                )
                await asyncio.sleep(self._retry.first_pause_s)

    async def send(self, path: str, source: Path | bytes, name: str, progress: OnProgress | None) -> Any:
        """Upload a file or bytes with PUT. If a gateway breaks off, the upload restarts at the next one."""
        total = len(source) if isinstance(source, bytes) else await asyncio.to_thread(os.path.getsize, source)

        def put() -> Awaitable[httpx.Response]:
            return self._http.put(
                self.urls[0] + path,
                content=_pieces(source, name, total, progress),
                headers={"Content-Length": str(total), "Content-Type": "application/octet-stream"},
                timeout=http_protocol.STREAM_TIMEOUT,
            )

        return await self._answer(put, "PUT", keyed=True)

    @asynccontextmanager
    async def _stream(self, path: str, **how: Any) -> AsyncIterator[httpx.Response]:
        """Get a stream from the gateway that is asked first. Raises the error that its answer stands for."""
        async with self._http.stream(
            "GET", self.urls[0] + path, timeout=http_protocol.STREAM_TIMEOUT, **how
        ) as response:
            if response.is_error:
                await response.aread()
            http_protocol.raise_for(response)
            yield response

    def _broken(self, error: Exception, asked: str, since: float | None, patience_s: float) -> float:
        """Go on to the next gateway; return since when the transfer is broken. Raises the error at last."""
        since = since or time.monotonic()
        self._next_gateway(asked)
        if time.monotonic() - since > patience_s:
            raise http_protocol.unreachable(self.urls, error) from error
        return since

    def _next_gateway(self, asked: str) -> None:
        """Ask another one than `asked` first from now on.

        Requests that failed beside each other know no others: two that each went on by one would be back at
        the gateway that is dead.
        """
        if self.urls[0] == asked:
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
