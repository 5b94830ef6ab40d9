"""Error handlers: every error becomes `application/problem+json`, one line that names place and remedy."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bus.logs import get_logger
from entities.gateway.http.problems import MEDIA_TYPE, TooLarge, problem, status_of
from entities.gateway.http.requests import discard
from schemas.errors import BadInput, DmscError, NotFound

log = get_logger("door")

RETRY_AFTER_S = 1.0
"""`Retry-After` where an error names no time of its own: an orchestrator fails over in about a second."""
_CODES = {404: NotFound.code, 405: "method_not_allowed"}


def explain_errors(app: FastAPI) -> None:
    """Adds handlers for `DmscError`, invalid parameters, unknown paths, and unexpected errors."""

    @app.exception_handler(DmscError)
    async def dmsc_error(request: Request, error: DmscError) -> JSONResponse:
        if isinstance(error, TooLarge):
            await discard(request)
        more: dict[str, Any] = {"retryable": error.retryable}
        if "problems" in error.fields:
            more["problems"] = str(error.fields["problems"]).split("\n")
        response = _answer(status_of(error), error.text, error.code, **more)
        if "retry_after_s" in error.fields:
            response.headers["Retry-After"] = str(max(1, math.ceil(float(error.fields["retry_after_s"]))))
        return response

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, f"{place}: {first['msg']}", BadInput.code)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        code = _CODES.get(error.status_code, BadInput.code)
        response = _answer(status, f"{request.method} {request.url.path}: {status.phrase}", code)
        response.headers.update(error.headers or {})  # such as Allow, with the methods that exist
        return response

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", path=request.url.path, exc_info=error)
        return _answer(
            HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed; its log says why", DmscError.code
        )


def _answer(status: HTTPStatus, detail: str, code: str, **more: Any) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        headers["Retry-After"] = f"{RETRY_AFTER_S:g}"
    if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # otherwise the rest of the body would be read, at any length
    return JSONResponse(problem(status, detail, code, **more), int(status), headers, MEDIA_TYPE)
