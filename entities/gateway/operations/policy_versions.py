"""Which version of a module is to be active: for operators (draft §3 AAM)."""

from __future__ import annotations

from bus import subjects
from entities.gateway.operations.access_client import Guard
from entities.gateway.operations.backends import Backends
from schemas.policy import PolicySwitch, PromoteModule, RollBackModule

DEADLINE_S = 15.0
"""One command to the orchestrator, repeated until answered: longer than a failover and two orders."""


class PromotionDesk:
    """For whoever may."""

    def __init__(self, backends: Backends, guard: Guard) -> None:
        self._backends = backends
        self._guard = guard

    async def promote(self, token: str, module: str, version: str, reason: str) -> PolicySwitch:
        access = await self._guard.check(token, "policy.promote", module)
        message = PromoteModule(module=module, version=version, reason=reason, user=access.user)
        answer = await self._backends.command(subjects.PROMOTE_MODULE, message, deadline_s=DEADLINE_S)
        assert isinstance(answer, PolicySwitch)
        return answer

    async def roll_back(self, token: str, module: str, reason: str) -> PolicySwitch:
        access = await self._guard.check(token, "policy.rollback", module)
        message = RollBackModule(module=module, reason=reason, user=access.user)
        answer = await self._backends.command(subjects.ROLL_BACK_MODULE, message, deadline_s=DEADLINE_S)
        assert isinstance(answer, PolicySwitch)
        return answer
