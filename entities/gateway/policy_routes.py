"""The HTTP door's part for functional modules: who runs, orders, questions, observations from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from entities.gateway.module_desk import ModuleDesk
from entities.gateway.operations import Authorization, bearer
from schemas.base import Message, Part, is_token
from schemas.errors import Ack, BadInput, NotFound
from schemas.explain import explain
from schemas.module_status import ModuleAnswer, ModuleList, OrderBody, QuestionBody
from schemas.observation import ObservationBatch
from schemas.policy import ModuleLifecycle

P = TypeVar("P", bound=Part)
Body = Callable[[Request], Awaitable[bytes]]


def add_policies(app: FastAPI, desk: ModuleDesk, body: Body) -> None:
    """Adds the routes. `body` reads a request's body, up to the door's limit."""

    @app.get("/v1/policies", response_model=ModuleList, tags=["policies"])
    async def modules(authorization: Authorization = None) -> Response:
        """The functional modules that run, and how they fare."""
        return _json(await desk.modules(bearer(authorization)))

    @app.post(
        "/v1/policies/{module}/orders",
        response_model=ModuleLifecycle,
        tags=["policies"],
        openapi_extra=_schema(OrderBody),
    )
    async def order(module: str, request: Request, authorization: Authorization = None) -> Response:
        """Activate, shadow, drain; enable or disable for jobs. The answer is the module as it then is."""
        token = bearer(authorization)
        return _json(await desk.order(token, _module(module), _parse(OrderBody, await body(request))))

    @app.post(
        "/v1/policies/{module}/questions",
        response_model=ModuleAnswer,
        tags=["policies"],
        openapi_extra=_schema(QuestionBody),
    )
    async def question(module: str, request: Request, authorization: Authorization = None) -> Response:
        """What it suggests for a job at this moment. Nothing of it is adopted."""
        token = bearer(authorization)
        return _json(await desk.ask(token, _module(module), _parse(QuestionBody, await body(request))))

    @app.post(
        "/v1/observations",
        status_code=202,
        response_model=Ack,
        tags=["policies"],
        openapi_extra=_schema(ObservationBatch),
    )
    async def observe(request: Request, authorization: Authorization = None) -> Response:
        """What a system outside the mesh has seen, for the modules that subscribe to observations."""
        token = bearer(authorization)
        batch = _parse(ObservationBatch, await body(request))
        return _json(await desk.observe(token, batch.observations), HTTPStatus.ACCEPTED)


def _parse(kind: type[P], text: bytes) -> P:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        lines = explain(error, kind)
        raise BadInput(lines[0], problems="\n".join(lines)) from None


def _schema(kind: type[Part]) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": kind.model_json_schema()}},
        }
    }


def _module(name: str) -> str:
    if not is_token(name):
        raise NotFound("there is no such module; a name has only letters, digits, _ and -")
    return name


def _json(message: Message, status: int = 200) -> Response:
    return Response(message.model_dump_json(), int(status), media_type="application/json")
