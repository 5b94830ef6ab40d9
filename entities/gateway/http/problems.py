"""Errors in HTTP form: a status and an `application/problem+json` body (RFC 9457)."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from entities.gateway.calls.failures import failure_status, openai_error, openai_status
from entities.gateway.operations.idempotency import KeyReused
from schemas.errors import BadInput, DmscError

MEDIA_TYPE = "application/problem+json"
OPENAI = ("/v1/models", "/v1/completions", "/v1/chat/", "/v1/embeddings", "/v1/files", "/v1/batches")
"""Paths of OpenAI's API, whose errors have its shape, so that its clients show them."""


KEPT_STATUS = frozenset({KeyReused.code})
"""Errors whose 422 is no 400 on OpenAI's paths either: the draft of `Idempotency-Key` wants it so."""


class TooLarge(BadInput):
    """A body above the API's limit."""

    code = "too_large"


class NotSatisfiable(BadInput):
    """A Range that begins behind the end."""

    code = "range_not_satisfiable"


def status_of(error: DmscError) -> HTTPStatus:
    """The HTTP status of an error. A refusal is 401 if the user is unknown, 403 if a known user may not."""
    if isinstance(error, TooLarge):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    if isinstance(error, NotSatisfiable):
        return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    return failure_status(error)


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
    if is_openai and code not in KEPT_STATUS:
        status = openai_status(status)
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
