"""Type 3 at the gateway (draft §4.3): ask the authorizer, remember a yes for as long as it says."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

from bus import subjects
from entities.gateway.backends import Asks
from schemas.errors import Refused
from schemas.signals import AccessDecision, AccessRequest


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """How access is asked for."""

    timeout_s: float = 3.0  # the authorizer's answer; nobody gets in without one
    remembered: int = 4096  # decisions kept; the least recently used go


class Guard:
    """Lets a request pass or raises `Refused`. Fails closed: no authorizer, no access (`Unavailable`)."""

    def __init__(self, bus: Asks, gateway: str, config: GuardConfig | None = None) -> None:
        self._bus = bus
        self._gateway = gateway
        self._config = config or GuardConfig()
        self._known: OrderedDict[tuple[str, str, str], tuple[float, AccessDecision]] = OrderedDict()
        self._users: OrderedDict[str, str] = OrderedDict()
        self._asking: dict[tuple[str, str, str], asyncio.Future[AccessDecision]] = {}
        self.asked = 0

    def user_of(self, token: str) -> str | None:
        """Whose token it was when it was last asked about, for limits; says nothing of what it may do."""
        return self._users.get(token_digest(token))

    async def check(self, token: str, action: str, resource: str) -> AccessDecision:
        """The decision that allows it.

        Raises:
            Refused: the token is unknown (field `user` empty) or its role may not do that.
            Unavailable: the authorizer does not answer.
        """
        key = (token_digest(token), action, resource)
        known = self._known.get(key)
        if known is not None and time.monotonic() < known[0]:
            self._known.move_to_end(key)
            return known[1]
        self._known.pop(key, None)
        decision = await self._ask(key, token)
        if decision.user:
            self._users[key[0]] = decision.user
            self._users.move_to_end(key[0])
            while len(self._users) > self._config.remembered:
                self._users.popitem(last=False)
        if not decision.allow:
            raise Refused(decision.reason, user=decision.user)
        if decision.valid_s > 0:
            self._known[key] = (time.monotonic() + decision.valid_s, decision)
            while len(self._known) > self._config.remembered:
                self._known.popitem(last=False)
        return decision

    async def _ask(self, key: tuple[str, str, str], token: str) -> AccessDecision:
        """The authorizer's answer; who asks the same meanwhile gets it too: no flood at each expiry."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._question(key, token))
            asking.add_done_callback(lambda done: self._asked(key, done))
        return await asyncio.shield(asking)

    def _asked(self, key: tuple[str, str, str], done: asyncio.Future[AccessDecision]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; nobody may be left

    async def _question(self, key: tuple[str, str, str], token: str) -> AccessDecision:
        self.asked += 1
        decision = await self._bus.request(
            subjects.ACCESS,
            AccessRequest(token=token, action=key[1], resource=key[2], gateway=self._gateway),
            timeout_s=self._config.timeout_s,
            gateway=self._gateway,
        )
        assert isinstance(decision, AccessDecision)
        return decision


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
