"""Ranges of files at a web server, by httpx. The server must answer range requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from bus.files.artifacts import allowed_address
from schemas.errors import BadData
from workers.data.storage.sources import FileSource, FileState, joined

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class WebTimes:
    """Limits of one request."""

    connect_s: float = 10.0
    answer_s: float = 60.0
    """Longest silence of a server that has been asked."""


class WebSource(FileSource):
    """Files below one web address; a query (`?signature=…`) is part of each file's address."""

    def __init__(self, url: str, times: WebTimes = WebTimes()) -> None:
        super().__init__(url)
        address, self._redirects = allowed_address(url)
        self._address = urlsplit(address)
        self._times = times
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()

    def _http(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                import httpx

                times = httpx.Timeout(self._times.answer_s, connect=self._times.connect_s)
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
                headers = {"Accept-Encoding": "identity"}
                self._client = httpx.Client(
                    timeout=times, limits=limits, headers=headers, follow_redirects=self._redirects
                )
            return self._client

    def _url(self, name: str) -> str:
        path = joined(self._address.path, name) if name else self._address.path
        return urlunsplit(self._address._replace(path=quote(path, safe="/%:@!$&'()*+,;=~")))

    def state(self, name: str) -> FileState:
        """Asks for the first byte: many servers answer HEAD otherwise, and ranges must work anyway."""
        with self._http().stream("GET", self._url(name), headers={"Range": "bytes=0-0"}) as answer:
            if answer.status_code == 416 and answer.headers.get("Content-Range", "").endswith("/0"):
                return FileState(0, _mark(answer))
            self._check(name, answer)
            if answer.status_code == 200 and answer.headers.get("Content-Length") == "0":
                return FileState(0, _mark(answer))
            return FileState(self._size(name, answer), _mark(answer))

    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        span = f"bytes={start}-{start + length - 1}"
        with self._http().stream("GET", self._url(name), headers={"Range": span}) as answer:
            if answer.status_code == 416:
                raise self.changed(name)
            self._check(name, answer)
            now = FileState(self._size(name, answer), _mark(answer))
            if now != state:
                raise self.changed(name, now)
            data = answer.read()
        if len(data) != length:
            raise OSError(f"{len(data):,} bytes came, not {length:,}")
        return data

    def _check(self, name: str, answer: httpx.Response) -> None:
        if answer.status_code == 404 or answer.status_code == 410:
            raise FileNotFoundError(self.described(name))
        if answer.is_redirect:
            raise BadData(
                f"{self.described(name)} redirects elsewhere, where this node's rules for URLs can't follow; "
                "name the address that it leads to"
            )
        answer.raise_for_status()

    def _size(self, name: str, answer: httpx.Response) -> int:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if answer.status_code != 206 or not total.isdigit():
            raise BadData(
                f"{self.described(name)}: the server answers no range requests; "
                "serve it by one that does (nginx, an object store), or copy it to this node"
            )
        return int(total)

    def names(self) -> list[str]:
        raise BadData(
            f"{self.described('')}: a web server tells no names of files; name the files, "
            "for example part-{000..009}.tar, or a folder with index.json"
        )

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


def _mark(answer: httpx.Response) -> str:
    headers = answer.headers
    return headers.get("ETag") or headers.get("Last-Modified") or ""
