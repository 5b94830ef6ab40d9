"""A user's own secrets: store, list by name, and remove them. No route returns a value."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, answer, body_of, named, parse, read_body
from schemas.base import TOKEN_PATTERN
from schemas.errors import Ack, BadInput
from schemas.secrets import SecretList, SecretValue

MOST_BYTES = 64 << 10
SecretName = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), named("secret")]


def secrets(context: HttpContext) -> APIRouter:
    """The routes below `/v1/secrets`."""
    router = APIRouter(prefix="/v1/secrets", tags=["secrets"])
    operations = context.jobs.secrets

    @router.get("", response_model=SecretList)
    async def list_secrets(bearer: HttpBearer) -> Response:
        """Your secrets, without their values."""
        return answer(await bearer.run(operations.list()))

    @router.put("/{name}", response_model=Ack, openapi_extra=body_of(SecretValue))
    async def store(name: SecretName, request: Request, bearer: HttpBearer) -> Response:
        """Store a secret, in place of one of the same name; a job names it `secret://NAME` as a URL."""
        value = parse(SecretValue, await read_body(request, MOST_BYTES), BadInput)
        return answer(await bearer.run(operations.put(name, value.value)))

    @router.delete("/{name}", response_model=Ack)
    async def remove(name: SecretName, bearer: HttpBearer) -> Response:
        """Remove a secret. Running jobs go on; jobs that start later and name it fail."""
        return answer(await bearer.run(operations.remove(name)))

    return router
