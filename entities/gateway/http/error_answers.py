"""Error handlers: every error becomes `application/problem+json`, one line that names place and remedy."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from bus.logs import get_logger
from entities.gateway.http.problems import TooLarge, problem_response, status_of
from entities.gateway.http.requests import discard
from schemas.errors import BadInput, DmscError, NotFound

log = get_logger("door")

CLIENT_LEFT = 499
"""The status, as nginx has it, under which a request is logged and counted whose client left before its body
had come. Nobody receives it."""
_CODES = {404: NotFound.code, 405: "method_not_allowed"}


def explain_errors(app: FastAPI, retry_after_s: float = 1.0) -> None:
    """Adds handlers for `DmscError`, invalid parameters, unknown paths, clients that left, unexpected errors.

    `retry_after_s`: `Retry-After` where an error names no time; an orchestrator fails over in about a second.
    """

    @app.exception_handler(DmscError)
    async def dmsc_error(request: Request, error: DmscError) -> JSONResponse:
        if isinstance(error, TooLarge):
            await discard(request)
        more: dict[str, Any] = {"retryable": error.retryable}
        if "problems" in error.fields:
            more["problems"] = str(error.fields["problems"]).split("\n")
        status = status_of(error)
        is_busy = status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
        wait_s = float(error.fields.get("retry_after_s", retry_after_s if is_busy else 0.0))
        more |= {"reason": str(error.fields.get("reason", "")), "param": error.fields.get("param")}
        path = request.url.path
        return problem_response(status, error.text, error.code, path=path, retry_after_s=wait_s, **more)

    @app.exception_handler(ClientDisconnect)
    async def client_left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        text, path = f"{place}: {first['msg']}", request.url.path
        return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, text, BadInput.code, path=path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        code = _CODES.get(error.status_code, BadInput.code)
        path = request.url.path
        response = problem_response(status, f"{request.method} {path}: {status.phrase}", code, path=path)
        response.headers.update(error.headers or {})  # such as Allow, with the methods that exist
        return response

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", path=request.url.path, exc_info=error)
        text, path = "the gateway failed; its log says why", request.url.path
        return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, text, DmscError.code, path=path)
