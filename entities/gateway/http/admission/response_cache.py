"""Answers to reads, as the bytes that went out, for as long as they are still true.

What many ask again and again, a job's record for example, is the same for everybody who may see it. Whether
the asker may is asked of the guard each time; only the work of making the same answer again is spared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import Scope

MOST_BYTES = 8 << 20
"""Of all answers, about; beyond it all are forgotten, which costs one answer each."""
ONE_BYTES = 256 << 10
EACH_BYTES = 1 << 10
"""Of memory, beside the body."""


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """An answer to whoever may do `action` on `resource`, while `present()` is `of`."""

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
    """By path and query."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, bytes], CachedResponse] = {}
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
        """`answer`, which was made of `of`; it holds while `present()` still gives that very object."""
        key = (request.scope["path"], request.scope["query_string"])
        body = bytes(answer.body)
        if present() is of and len(body) <= ONE_BYTES:
            if key not in self._kept:
                self._bytes += len(body) + EACH_BYTES
            if self._bytes > MOST_BYTES:
                self._kept.clear()
                self._bytes = len(body) + EACH_BYTES
            self._kept[key] = CachedResponse(action, resource, of, present, tuple(answer.raw_headers), body)
        return answer

    def find(self, scope: Scope) -> CachedResponse | None:
        if scope["method"] != "GET":
            return None
        found = self._kept.get((scope["path"], scope["query_string"]))
        return found if found is not None and found.is_true else None
