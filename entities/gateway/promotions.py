"""The HTTP door's part for versions of modules: which one is to be active. For operators (draft §3 AAM)."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from bus import subjects
from bus.connection import Bus
from entities.gateway.guard import Guard
from entities.gateway.operations import Authorization, Reason, bearer
from schemas.base import is_token
from schemas.errors import NotFound
from schemas.policy import PolicySwitch, PromoteModule, RollBackModule

DEADLINE_S = 15.0
"""One command to the orchestrator, repeated until answered: longer than a failover and two orders."""

Version = Annotated[str, Query(max_length=100, description="as `dmsc policy list` shows it")]


class PromotionDesk:
    """For whoever may."""

    def __init__(self, bus: Bus, guard: Guard) -> None:
        self._bus = bus
        self._guard = guard

    async def promote(self, token: str, module: str, version: str, reason: str) -> PolicySwitch:
        access = await self._guard.check(token, "policy.promote", module)
        message = PromoteModule(module=module, version=version, reason=reason, user=access.user)
        answer = await self._bus.command(subjects.PROMOTE_MODULE, message, deadline_s=DEADLINE_S)
        assert isinstance(answer, PolicySwitch)
        return answer

    async def roll_back(self, token: str, module: str, reason: str) -> PolicySwitch:
        access = await self._guard.check(token, "policy.rollback", module)
        message = RollBackModule(module=module, reason=reason, user=access.user)
        answer = await self._bus.command(subjects.ROLL_BACK_MODULE, message, deadline_s=DEADLINE_S)
        assert isinstance(answer, PolicySwitch)
        return answer


def add_promotions(app: FastAPI, desk: PromotionDesk) -> None:
    """Adds the routes."""

    @app.post("/v1/policies/{module}/promote", response_model=PolicySwitch, tags=["policies"])
    async def promote(
        module: str, version: Version, authorization: Authorization = None, reason: Reason = ""
    ) -> Response:
        """Make this running version the active one; the one that was goes on in shadow, both are scored."""
        return _json(await desk.promote(bearer(authorization), _module(module), version, reason))

    @app.post("/v1/policies/{module}/rollback", response_model=PolicySwitch, tags=["policies"])
    async def rollback(module: str, authorization: Authorization = None, reason: Reason = "") -> Response:
        """Make the version active again that was before the last promotion."""
        return _json(await desk.roll_back(bearer(authorization), _module(module), reason))


def _module(module: str) -> str:
    if not is_token(module):
        raise NotFound("there is no such module; a name has only letters, digits, _ and -")
    return module


def _json(message: PolicySwitch) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
