"""What an error is at the door: its HTTP status, and its body on OpenAI's paths. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from schemas.errors import (
    BadInput,
    BadMessage,
    Conflict,
    DeadlineExceeded,
    DmscError,
    Fenced,
    IllegalTransition,
    NotFound,
    RateLimited,
    Refused,
    Unavailable,
)

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_STATUS: tuple[tuple[type[DmscError], HTTPStatus], ...] = (  # the first matching class counts
    (RateLimited, HTTPStatus.TOO_MANY_REQUESTS),
    (BadMessage, HTTPStatus.BAD_REQUEST),
    (BadInput, HTTPStatus.UNPROCESSABLE_ENTITY),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Fenced, HTTPStatus.CONFLICT),
    (IllegalTransition, HTTPStatus.CONFLICT),
    (DeadlineExceeded, HTTPStatus.GATEWAY_TIMEOUT),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)


def failure_status(error: DmscError) -> HTTPStatus:
    """The HTTP status of an error. A refusal is 401 if the user is unknown, 403 if a known user may not."""
    if isinstance(error, Refused):
        return HTTPStatus.FORBIDDEN if error.fields.get("user") else HTTPStatus.UNAUTHORIZED
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR


def openai_status(status: HTTPStatus) -> HTTPStatus:
    """The status on OpenAI's paths, whose clients know no 422."""
    return HTTPStatus.BAD_REQUEST if status is HTTPStatus.UNPROCESSABLE_ENTITY else status


def openai_error(status: HTTPStatus, detail: str, code: str, param: str | None = None) -> dict[str, Any]:
    """The error's JSON body on OpenAI's paths."""
    usual = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = _TYPES.get(status, usual)
    named = None if param is None else _written(param)
    return {"error": {"message": _written(detail), "type": kind, "param": named, "code": code}}


def _written(text: str) -> str:
    """The text as UTF-8 can have it: a request's names may have half a character, which is told as `?`."""
    return text.encode("utf-8", "replace").decode()


def openai_failure(error: DmscError) -> tuple[HTTPStatus, dict[str, Any]]:
    """Status and body of an error on OpenAI's paths."""
    status = openai_status(failure_status(error))
    code = str(error.fields.get("reason", "")) or error.code
    param = error.fields.get("param")
    return status, openai_error(status, error.text, code, None if param is None else str(param))
