"""A cache of answers to reads, as the bytes that were sent, for as long as they are still true.

A job's record, for example, is read again and again, and is the same for every bearer who may see it. Access
is checked for each request all the same; the cache only saves making the same answer again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import Scope

MOST_BYTES = 8 << 20
"""About the size of the whole cache; above it the cache is emptied, which costs one new answer each."""
ONE_BYTES = 256 << 10
"""The largest body that is cached."""
EACH_BYTES = 1 << 10
"""Memory of one entry, beside its body."""


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """An answer for bearers who may do `action` on `resource`; true while `present()` is the object `of`."""

    action: str
    resource: str
    of: object
    present: Callable[[], object]
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def is_true(self) -> bool:
        return self.present() is self.of


class ResponseCache:
    """Cached answers by path and query."""

    def __init__(self) -> None:
        self._responses: dict[tuple[str, bytes], CachedResponse] = {}
        self._bytes = 0

    def keep(
        self,
        request: Request,
        answer: Response,
        action: str,
        resource: str,
        of: object,
        present: Callable[[], object],
    ) -> Response:
        """Stores and returns `answer`, made of `of`; it is true while `present()` returns that object."""
        key = (request.scope["path"], request.scope["query_string"])
        body = bytes(answer.body)
        if present() is of and len(body) <= ONE_BYTES:
            if key not in self._responses:
                self._bytes += len(body) + EACH_BYTES
            if self._bytes > MOST_BYTES:
                self._responses.clear()
                self._bytes = len(body) + EACH_BYTES
            self._responses[key] = CachedResponse(
                action, resource, of, present, tuple(answer.raw_headers), body
            )
        return answer

    def find(self, scope: Scope) -> CachedResponse | None:
        if scope["method"] != "GET":
            return None
        response = self._responses.get((scope["path"], scope["query_string"]))
        return response if response is not None and response.is_true else None
