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
OPENAI = ("/v1/models", "/v1/completions", "/v1/chat/", "/v1/embeddings", "/v1/files", "/v1/batches")
"""Paths of OpenAI's API, whose errors have its shape, so that its clients show them."""
_OPENAI_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


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
    status: HTTPStatus,
    detail: str,
    code: str,
    *,
    path: str = "",
    reason: str = "",
    param: str | None = None,
    retry_after_s: float = 0.0,
    **more: Any,
) -> JSONResponse:
    """The answer with the problem. `retry_after_s` 0: without `Retry-After`.

    `path`: the request's. On those of OpenAI's API the body has its shape; `reason` is its code for the
    error, and `param` the parameter at fault.
    """
    is_openai = path.startswith(OPENAI)
    if is_openai and status is HTTPStatus.UNPROCESSABLE_ENTITY:
        status = HTTPStatus.BAD_REQUEST  # what OpenAI's clients know
    headers = {}
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if retry_after_s > 0:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # otherwise the rest of the body would be read, at any length
    if is_openai:
        return JSONResponse(openai_error(status, detail, reason or code, param), int(status), headers)
    return JSONResponse(problem(status, detail, code, **more), int(status), headers, MEDIA_TYPE)


def openai_error(status: HTTPStatus, detail: str, code: str, param: str | None = None) -> dict[str, Any]:
    """The error's JSON body on OpenAI's paths."""
    usual = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = _OPENAI_TYPES.get(status, usual)
    return {"error": {"message": detail, "type": kind, "param": param, "code": code}}
