"""Errors in HTTP form: a status and an `application/problem+json` body (RFC 9457)."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

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

MEDIA_TYPE = "application/problem+json"


class TooLarge(BadInput):
    """A body above the API's limit."""

    code = "too_large"


class NotSatisfiable(BadInput):
    """A Range that begins behind the end."""

    code = "range_not_satisfiable"


_STATUS: tuple[tuple[type[DmscError], HTTPStatus], ...] = (  # the first matching class counts
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (NotSatisfiable, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE),
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


def status_of(error: DmscError) -> HTTPStatus:
    """The HTTP status of an error. A refusal is 401 if the user is unknown, 403 if a known user may not."""
    if isinstance(error, Refused):
        return HTTPStatus.FORBIDDEN if error.fields.get("user") else HTTPStatus.UNAUTHORIZED
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR


def problem(status: HTTPStatus, detail: str, code: str, **more: Any) -> dict[str, Any]:
    """The problem's JSON body. `detail` is one line, safe to show to users."""
    return {
        "type": f"urn:dmsc:error:{code}",
        "title": status.phrase,
        "status": int(status),
        "detail": detail,
        "code": code,
        **more,
    }


def problem_response(
    status: HTTPStatus, detail: str, code: str, *, retry_after_s: float = 0.0, **more: Any
) -> JSONResponse:
    """The answer with the problem. `retry_after_s` 0: without `Retry-After`."""
    headers = {}
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if retry_after_s > 0:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # otherwise the rest of the body would be read, at any length
    return JSONResponse(problem(status, detail, code, **more), int(status), headers, MEDIA_TYPE)
