"""Aliases with their history, rules of approval, and the mesh's keys: below `/v1/registry`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    HttpBearer,
    IdempotencyKey,
    PageAsked,
    answer,
    body_of,
    parse,
    read_body,
)
from entities.gateway.http.routes.models.parts import MOST_BYTES, PREFIX, Alias, At, Model
from schemas.errors import BadInput
from schemas.model_pages import AliasHistory, MoveBody, RuleBody
from schemas.models.commands import MESH_RULE, ModelKeys
from schemas.models.reference import refuse_name
from schemas.models.version import AliasMove, NamedModel

RuleName = Annotated[
    str,
    Path(max_length=64, description="a model's name, or _ for all", json_schema_extra={"pattern": r"^\w"}),
]


def aliases(context: HttpContext) -> APIRouter:
    """The routes below `/v1/registry/models/{name}/aliases`."""
    router = APIRouter(prefix=f"{PREFIX}/models/{{name}}/aliases", tags=["models"])
    operations = context.models

    @router.get("", response_model=AliasHistory)
    async def history(
        name: Model,
        bearer: HttpBearer,
        page: PageAsked,
        alias: Annotated[str | None, Query(max_length=64, description="only of this alias")] = None,
        at: At = None,
        newest: Annotated[bool, Query(description="the newest ones first")] = False,
    ) -> Response:
        """Each move of the model's aliases: who, when, from, to, why; with `at`, those in force then."""
        moves = await bearer.run(operations.history(name, alias, at))
        return page.of(
            AliasHistory, moves, lambda move: (move.at, move.alias, move.number), descending=newest
        )

    @router.post("/{alias}", response_model=AliasMove, openapi_extra=body_of(MoveBody))
    async def move(name: Model, alias: Alias, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Have an alias name another version. With `expect`, only if it names that one now."""
        text = await context.body(keyed)
        operation = operations.move(name, alias, parse(MoveBody, text, BadInput), keyed.key)
        return await context.command(keyed, bearer, operation, text)

    return router


def model_rules(context: HttpContext) -> APIRouter:
    """`/v1/registry/rules` and `/v1/registry/keys`."""
    router = APIRouter(prefix=PREFIX, tags=["models"])
    operations = context.models

    def checked(name: str) -> str:
        if name != MESH_RULE:
            refuse_name(name)
        return name

    @router.get("/rules/{name}", response_model=NamedModel)
    async def read_rule(name: RuleName, bearer: HttpBearer) -> Response:
        """How many approvals the aliases of a model want; `_`: of all models."""
        return answer(await bearer.run(operations.rules(checked(name))))

    @router.put("/rules/{name}", response_model=NamedModel, openapi_extra=body_of(RuleBody))
    async def set_rule(name: RuleName, request: Request, bearer: HttpBearer) -> Response:
        """Say how many approvals a version needs before an alias names it; for operators."""
        body = parse(RuleBody, await read_body(request, MOST_BYTES), BadInput)
        return answer(await bearer.run(operations.rule(checked(name), body)))

    @router.get("/keys", response_model=ModelKeys)
    async def keys(bearer: HttpBearer) -> Response:
        """The public keys that versions are signed with (ed25519); the present one is first."""
        return answer(await bearer.run(operations.keys()))

    return router
