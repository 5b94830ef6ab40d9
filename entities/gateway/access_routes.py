"""The HTTP door's part for users, rules and audit. The AAM decides and carries out; this hands on.

A new token is told in the answer to the request that made it, and nowhere else.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response
from pydantic import Field

from bus import subjects
from bus.connection import Bus
from entities.gateway.guard import Guard
from entities.gateway.operations import Authorization, Reason, bearer
from schemas.access import AccessExplanation, ExplainAccess, UserAnswer, UserCommand, UserOp, WhoAmI
from schemas.audit import AuditEntry, AuditPage, AuditRecord
from schemas.base import Message, Part, Token, is_token
from schemas.errors import NotFound
from schemas.signals import Role

TIMEOUT_S = 12.0
"""One command to the AAM: longer than what it may wait for the audit stream."""
PAGE = 1000


class NewUser(Part):
    """Body of `POST /v1/users`."""

    name: Token
    role: Role
    expires_s: float | None = Field(None, gt=0, description="how long the first token lasts; default: 8 h")


class AccessDesk:
    """For whoever may."""

    def __init__(self, bus: Bus, guard: Guard, gateway: str) -> None:
        self._bus = bus
        self._guard = guard
        self._gateway = gateway

    async def command(
        self,
        token: str,
        op: UserOp,
        name: str = "",
        *,
        role: Role | None = None,
        token_id: str | None = None,
        expires_s: float | None = None,
        reason: str = "",
    ) -> UserAnswer:
        """Not repeated: whether it was done is unknown where nobody answered in time; list the users then."""
        message = UserCommand(
            token=token, gateway=self._gateway, op=op, name=name, role=role, token_id=token_id,
            expires_s=expires_s, reason=reason,
        )  # fmt: skip
        answer = await self._bus.request(
            subjects.USER_COMMAND, message, timeout_s=TIMEOUT_S, gateway=self._gateway
        )
        assert isinstance(answer, UserAnswer)
        return answer

    async def who(self, token: str) -> WhoAmI:
        access = await self._guard.check(token, "self.read", "self")
        assert access.role is not None
        return WhoAmI(user=access.user, role=access.role, expires_at=access.expires_at)

    async def explain(self, token: str, user: str, action: str, resource: str) -> AccessExplanation:
        message = ExplainAccess(
            token=token, gateway=self._gateway, user=user, action=action, resource=resource
        )
        answer = await self._bus.request(
            subjects.EXPLAIN_ACCESS, message, timeout_s=TIMEOUT_S, gateway=self._gateway
        )
        assert isinstance(answer, AccessExplanation)
        return answer

    async def audit(self, token: str, start: int, limit: int) -> AuditPage:
        """Entries from sequence `start` on."""
        await self._guard.check(token, "audit.read", "audit")
        entries: list[AuditEntry] = []
        async for recorded in self._bus.history(subjects.AUDIT, start=start):
            if isinstance(recorded.message, AuditRecord):
                if len(entries) == limit:
                    return AuditPage(entries=tuple(entries), next_start=recorded.sequence)
                entries.append(AuditEntry(sequence=recorded.sequence, record=recorded.message))
        return AuditPage(entries=tuple(entries))

    async def latest(self, token: str, limit: int) -> AuditPage:
        """The last entries."""
        await self._guard.check(token, "audit.read", "audit")
        last, _ = await self._bus.tail(subjects.AUDIT)
        return await self.audit(token, max(1, last - limit + 1), limit)


def add_access(app: FastAPI, desk: AccessDesk) -> None:
    """Adds the routes."""

    @app.get("/v1/whoami", response_model=WhoAmI, tags=["users"])
    async def whoami(authorization: Authorization = None) -> Response:
        """Whose token this is, with which role, and until when."""
        return _json(await desk.who(bearer(authorization)))

    @app.get("/v1/users", response_model=UserAnswer, tags=["users"])
    async def users(authorization: Authorization = None) -> Response:
        """Who is a user, with the ids and times of their tokens."""
        return _json(await desk.command(bearer(authorization), "list"))

    @app.post("/v1/users", status_code=201, response_model=UserAnswer, tags=["users"])
    async def add(new: NewUser, authorization: Authorization = None) -> Response:
        """A new user, and their first token: it is shown this once."""
        answer = await desk.command(
            bearer(authorization), "add", new.name, role=new.role, expires_s=new.expires_s
        )
        return _json(answer, 201)

    @app.post("/v1/users/{name}/tokens", status_code=201, response_model=UserAnswer, tags=["users"])
    async def token(
        name: str,
        authorization: Authorization = None,
        expires_s: Annotated[float | None, Query(gt=0, description="how long it lasts; default: 8 h")] = None,
    ) -> Response:
        """Another token of a user: it is shown this once."""
        return _json(
            await desk.command(bearer(authorization), "token", _user(name), expires_s=expires_s), 201
        )

    @app.post("/v1/users/{name}/revoke", response_model=UserAnswer, tags=["users"])
    async def revoke(
        name: str,
        authorization: Authorization = None,
        token_id: Annotated[str | None, Query(description="one token; default: all of them")] = None,
        reason: Reason = "",
    ) -> Response:
        """Tokens of a user open nothing any more, at once and everywhere."""
        if token_id is not None and not is_token(token_id):
            raise NotFound("there is no such token; an id has only letters, digits, _ and -")
        return _json(
            await desk.command(bearer(authorization), "revoke", name, token_id=token_id, reason=reason)
        )

    @app.delete("/v1/users/{name}", response_model=UserAnswer, tags=["users"])
    async def remove(name: str, authorization: Authorization = None, reason: Reason = "") -> Response:
        """A user goes, and all their tokens with them."""
        return _json(await desk.command(bearer(authorization), "remove", _user(name), reason=reason))

    @app.get("/v1/access/explain", response_model=AccessExplanation, tags=["users"])
    async def explain(
        action: Annotated[str, Query(max_length=200, description="e.g. job.cancel")],
        authorization: Authorization = None,
        user: Annotated[str, Query(max_length=120, description="a name, or a role; default: yourself")] = "",
        resource: Annotated[str, Query(max_length=512, description="a job, node, module, …")] = "",
    ) -> Response:
        """Which rule lets whom do what, or why none does."""
        return _json(await desk.explain(bearer(authorization), user, action, resource))

    @app.get("/v1/audit", response_model=AuditPage, tags=["audit"])
    async def audit(
        authorization: Authorization = None,
        start: Annotated[int | None, Query(ge=1, description="first sequence; default: the latest")] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
    ) -> Response:
        """Refusals and privileged acts, hash-chained; in order from `start`, or the latest."""
        token = bearer(authorization)
        page = await (desk.latest(token, limit) if start is None else desk.audit(token, start, limit))
        return _json(page)


def _user(name: str) -> str:
    if not is_token(name):
        raise NotFound("there is no such user; a name has only letters, digits, _ and -")
    return name


def _json(message: Message, status: int = 200) -> Response:
    return Response(
        message.model_dump_json(),
        status,
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
