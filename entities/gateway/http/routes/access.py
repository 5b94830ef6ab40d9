"""Users and their tokens, rules, and the audit stream.

A new token is stated only in the answer to the request that made it. So these answers are never stored for
repetitions, whatever idempotency key comes with the request.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, Reason, UserName
from entities.gateway.operations.access import AccessOperations
from schemas.access import AccessExplanation, UserAnswer, WhoAmI
from schemas.audit import AuditPage
from schemas.base import Message, Part, Seconds, is_token
from schemas.base import Token as Name
from schemas.errors import NotFound
from schemas.signals import Role

PAGE = 1000


class NewUser(Part):
    """Body of `POST /v1/users`."""

    name: Name
    role: Role
    expires_s: Seconds | None = Field(None, gt=0, description="how long the first token lasts; default: 8 h")


def access(context: HttpContext) -> APIRouter:
    """The routes below `/v1/users`, `/v1/access`, `/v1/audit`, and `/v1/whoami`."""
    router = APIRouter(prefix="/v1")
    operations = AccessOperations(context.bus, context.metrics.gateway, context.jobs.stored)

    @router.get("/whoami", response_model=WhoAmI, tags=["users"])
    async def whoami(bearer: HttpBearer) -> Response:
        """Whose token this is, with which role, and until when."""
        return _json(await bearer.run(operations.who()))

    @router.get("/users", response_model=UserAnswer, tags=["users"])
    async def users(bearer: HttpBearer) -> Response:
        """All users, with the ids and times of their tokens."""
        return _json(await operations.command(bearer, "list"))

    @router.post("/users", status_code=201, response_model=UserAnswer, tags=["users"])
    async def add(new: NewUser, bearer: HttpBearer) -> Response:
        """Add a user. The answer shows the user's first token, this one time."""
        answer = await operations.command(bearer, "add", new.name, role=new.role, expires_s=new.expires_s)
        return _json(answer, 201)

    @router.post("/users/{name}/tokens", status_code=201, response_model=UserAnswer, tags=["users"])
    async def another_token(
        name: UserName,
        bearer: HttpBearer,
        expires_s: Annotated[Seconds | None, Query(gt=0, description="default: 8 h")] = None,
    ) -> Response:
        """Make another token of a user. The answer shows it, this one time."""
        return _json(await operations.command(bearer, "token", name, expires_s=expires_s), 201)

    @router.post("/users/{name}/revoke", response_model=UserAnswer, tags=["users"])
    async def revoke(
        name: UserName,
        bearer: HttpBearer,
        token_id: Annotated[str | None, Query(description="one token; default: all of them")] = None,
        reason: Reason = "",
    ) -> Response:
        """Revoke one token of a user, or all of them, at once and everywhere."""
        if token_id is not None and not is_token(token_id):
            raise NotFound("there is no such token; an id has only letters, digits, _ and -")
        return _json(await operations.command(bearer, "revoke", name, token_id=token_id, reason=reason))

    @router.delete("/users/{name}", response_model=UserAnswer, tags=["users"])
    async def remove(name: UserName, bearer: HttpBearer, reason: Reason = "") -> Response:
        """Remove a user, with all their tokens."""
        return _json(await operations.command(bearer, "remove", name, reason=reason))

    @router.get("/access/explain", response_model=AccessExplanation, tags=["users"])
    async def explain(
        action: Annotated[str, Query(max_length=200, description="e.g. job.cancel")],
        bearer: HttpBearer,
        user: Annotated[str, Query(max_length=120, description="a name, or a role; default: yourself")] = "",
        resource: Annotated[str, Query(max_length=512, description="a job, node, module, …")] = "",
    ) -> Response:
        """Explain which rule permits a user an action on a resource, or why none does."""
        return _json(await operations.explain(bearer, user, action, resource))

    @router.get("/audit", response_model=AuditPage, tags=["audit"])
    async def audit(
        bearer: HttpBearer,
        start: Annotated[
            int | None, Query(ge=1, le=1 << 62, description="first sequence; default: the latest")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
    ) -> Response:
        """The audit stream, hash-chained: refusals and privileged acts, from `start` on or the latest."""
        return _json(await bearer.run(operations.audit(start, limit)))

    return router


def _json(message: Message, status: int = 200) -> Response:
    return Response(
        message.model_dump_json(),
        status,
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
