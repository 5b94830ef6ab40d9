"""One artifact as an HTTP answer, whole or a range of its bytes (RFC 9110 §14)."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bus.files.artifacts import ReadableArtifacts
from entities.gateway.http.problems import NotSatisfiable
from entities.gateway.http.request_facts import RequestFacts

BYTES = "application/octet-stream"
_content = {BYTES: {"schema": {"type": "string", "format": "binary"}}}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "the file", "content": _content},
    206: {"description": "the range that was asked for", "content": _content},
}
"""A route's `responses`."""


class File(StreamingResponse):
    """The response class of routes that answer with a file; it documents their media type.

    However slowly its client reads, it takes no place of the requests that are being answered.
    """

    media_type = BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts: RequestFacts = scope["dmsc"]
        with facts.downloads():
            facts.leave()
            await super().__call__(scope, receive, send)


async def file_answer(artifacts: ReadableArtifacts, name: str, byte_range: str | None) -> Response:
    """An answer with the file, or with the range that `byte_range` asks for.

    Raises:
        NotFound: there is no such file.
        NotSatisfiable: the range begins behind the end.
    """
    size = await artifacts.size(name)
    headers = {"Accept-Ranges": "bytes"}
    part = parse_range(byte_range, size)
    start, length = part or (0, size)
    headers["Content-Length"] = str(length)
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
    status = HTTPStatus.OK if part is None else HTTPStatus.PARTIAL_CONTENT
    return File(artifacts.open_range(name, start, length), int(status), headers)


_RANGE = re.compile(r"^bytes=(\d*)-(\d*)$")


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, length) in bytes of the requested range; None means the whole file.

    Several ranges, and units other than bytes, are ignored, as the RFC permits. A range that begins behind
    the end raises `NotSatisfiable`.
    """
    match = _RANGE.match(header.replace(" ", "")) if header else None
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        length = min(int(last), size)
        start = size - length
    else:
        start = int(first)
        if last and int(last) < start:
            return None
        end = min(int(last) + 1, size) if last else size
        length = end - start
    if length <= 0 or start >= size:
        raise NotSatisfiable(f"Range {header}: the file has {size} bytes", size=size)
    return start, length
