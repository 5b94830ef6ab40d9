"""The routes below `/v1/accounts`."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, answer
from schemas.accounts import AccountKey, AccountStatement
from schemas.base import LAST_TIME
from schemas.signals import Role

At = Annotated[
    float | None, Query(ge=0, lt=LAST_TIME, allow_inf_nan=False, description="seconds since the epoch")
]


def accounts(context: HttpContext) -> APIRouter:
    """The routes of statements."""
    router = APIRouter(prefix="/v1/accounts", tags=["accounts"])

    @router.get("", response_model=AccountStatement)
    async def statement(
        bearer: HttpBearer,
        by: Annotated[AccountKey, Query(description="what the lines are about")] = "job",
        since: At = None,
        until: At = None,
        user: Annotated[str | None, Query(max_length=120, description="only theirs")] = None,
        service: Annotated[str | None, Query(max_length=120, description="only its versions'")] = None,
        everybody: Annotated[
            bool | None, Query(alias="all", description="of all users; without it, operators see all")
        ] = None,
    ) -> Response:
        """What devices were used for, energy, carbon and price, by job, user, tenant or service.

        From `since` (a day ago) to `until` (now), in quarters of an hour. Others than operators get their own
        account unless they ask for another one: `only` says whose it is.
        """
        now = time.time()
        begin = now - 86_400.0 if since is None else since
        end = now if until is None else until
        if user is None and everybody is not True:
            asker = await bearer.check("self.read", "self")
            if everybody is False or asker.role not in (Role.OPERATOR, Role.ADMIN):
                user = asker.user
        return answer(await bearer.run(context.accounts.statement(by, begin, end, user, service)))

    return router
