"""A file's lines as units of requests, and answers as lines. Pure.

A line is a request as OpenAI's batches have it (`custom_id`, `method`, `url`, `body`), or a body alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, get_args

from entities.gateway.calls.failures import openai_error
from entities.gateway.calls.json_bounds import check_elements
from schemas.errors import BadInput
from schemas.services.batches import MOST_LINE_BYTES, MOST_LINES, UNIT_BYTES, UNIT_LINES
from schemas.services.calls import CallPath

PATHS: tuple[CallPath, ...] = get_args(CallPath)
KEYS = frozenset({"custom_id", "method", "url", "body"})
MOST_ID = 200
MOST_SERVICES = 16


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request.

    Attributes:
        number: From 0, in the batch.
        key: The same for the same line at its place.
        model: That it names, or the batch; empty: none.
        user: That it names.
        text: Its body as JSON. Decoded it may take twenty times as much, and so it is only while it is read.
    """

    number: int
    key: str
    custom_id: str
    model: str
    user: str | None
    text: bytes


@dataclass(slots=True)
class BatchScan:
    """What a file has, found in one pass over its bytes.

    Attributes:
        offsets: Byte at which each unit of requests begins, and behind the last one, the file's end.
        firsts: Number of the first request of each unit.
        lines: Requests; empty lines are none.
        models: Models that the requests name; empty: some names none.
    """

    path: CallPath
    offsets: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    lines: int = 0
    models: dict[str, None] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)
    _at: int = 0
    _rest: bytes = b""

    def add(self, piece: bytes) -> None:
        """Takes the next bytes of the file.

        Raises:
            BadInput: it has too many lines, one is too long, or two requests have one `custom_id`.
        """
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._take(line, 1)
        if len(self._rest) > MOST_LINE_BYTES:
            raise self._too_long()

    def end(self) -> None:
        """The file is over. Raises `BadInput` as `add` does, or if it has no request."""
        self._take(self._rest, 0)
        self._rest = b""
        if not self.lines:
            raise BadInput(
                "the file has no request: write one JSON object in each line", param="input_file_id"
            )
        self.offsets.append(self._at)

    def _take(self, line: bytes, ending: int) -> None:
        begin, self._at = self._at, self._at + len(line) + ending
        if len(line) > MOST_LINE_BYTES:
            raise self._too_long()
        if not line.strip():
            return
        if self.lines >= MOST_LINES:
            raise BadInput(f"the file has more than {MOST_LINES:,} requests; split it", param="input_file_id")
        if self._is_unit_full():
            self.offsets.append(begin)
            self.firsts.append(self.lines)
        try:
            request = request_of(line, self.lines, self.path, "")
        except BadInput:  # its answer is an error line; the others go on
            request = None
        self.lines += 1
        if request is None:
            return
        former = self._ids.setdefault(request.custom_id, self.lines)
        if former != self.lines:
            raise BadInput(
                f"requests {former} and {self.lines} have one custom_id, {request.custom_id[:60]!r}: give "
                "each its own",
                reason="duplicate_custom_id",
                param="input_file_id",
            )
        if len(self.models) <= MOST_SERVICES:
            self.models[request.model] = None

    def _is_unit_full(self) -> bool:
        """Whether the request that was just read begins a unit; the first one does."""
        if not self.firsts or self.lines - self.firsts[-1] == UNIT_LINES:
            return True
        return self._at - self.offsets[-1] > UNIT_BYTES

    def _too_long(self) -> BadInput:
        text = f"request {self.lines + 1} has more than {MOST_LINE_BYTES} bytes; shorten it"
        return BadInput(text, param="input_file_id")


def requests_in(data: bytes) -> list[bytes]:
    """The lines with a request, of a unit's bytes."""
    return [line for line in data.split(b"\n") if line.strip()]


def request_of(line: bytes, number: int, path: CallPath, model: str) -> BatchRequest:
    """The request in a line. `model`: of one that names none.

    Raises:
        BadInput: it is none; `custom_id` is the line's own, or that of its place where it has none.
    """
    usual = f"request-{number + 1}"
    try:
        check_elements(line)
    except BadInput as error:
        raise BadInput(f"request {number + 1}: {error.text}", custom_id=usual) from None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        text = f"request {number + 1} is no JSON: {str(error).partition(';')[0][:120]}"
        raise BadInput(text, custom_id=usual) from None
    if not isinstance(document, dict):
        raise BadInput(f"request {number + 1} is no JSON object", custom_id=usual)
    named = document.get("custom_id")
    custom_id = named if isinstance(named, str) and named else usual
    body: Any = document
    if "body" in document or "url" in document:
        body = document.get("body")
        problem = _problem(document, path)
    else:
        body = {key: value for key, value in document.items() if key != "custom_id"}
        problem = "" if named is None or isinstance(named, str) else "custom_id has to be a text"
    if len(custom_id) > MOST_ID:
        problem, custom_id = f"custom_id has more than {MOST_ID} characters", custom_id[:MOST_ID]
    if not _is_text(custom_id):
        problem, custom_id = "custom_id has half a character", usual
    if problem or not isinstance(body, dict):
        raise BadInput(f"request {number + 1}: {problem or 'body is no object'}", custom_id=custom_id)
    if model and not body.get("model"):
        body = {**body, "model": model}
    digest = hashlib.blake2b(b"%d\0" % number + line.strip(), digest_size=12).hexdigest()
    asked, user = body.get("model") or "", body.get("user")
    return BatchRequest(
        number,
        digest,
        custom_id,
        asked if isinstance(asked, str) else "",
        user if isinstance(user, str) else None,
        json.dumps(body).encode(),
    )


def _problem(document: dict[str, Any], path: CallPath) -> str:
    if unknown := sorted(document.keys() - KEYS):
        return f"unknown key {unknown[0][:60]!r}; a request has custom_id, method, url, body"
    if document.get("method", "POST") != "POST":
        return "method has to be POST"
    if document.get("url", path) != path:
        return f"url is {str(document['url'])[:60]!r}, and the batch's endpoint {path}"
    if not isinstance(document.get("custom_id", ""), str):
        return "custom_id has to be a text"
    return ""


def _is_text(text: str) -> bool:
    """Whether it can be written: JSON may have one half of a character that UTF-16 writes as a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def answered_line(key: str, custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    """The line of a request that was answered, well or with an error."""
    response = {"status_code": status, "request_id": f"req_{key}", "body": body}
    return _line({"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": None})


def unread_line(number: int, error: BadInput) -> bytes:
    """The line of a request that could not be read."""
    custom_id = error.fields.get("custom_id")
    told = openai_error(HTTPStatus.BAD_REQUEST, error.text, "invalid_json_line")["error"]
    return _line(
        {"id": f"batch_req_unread_{number}", "custom_id": custom_id, "response": None, "error": told}
    )


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
