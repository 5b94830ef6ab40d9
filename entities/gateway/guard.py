"""Type 3 at the gateway (draft §4.3): ask the authorizer, remember a yes for as long as it says."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from schemas.errors import Refused
from schemas.signals import AccessDecision, AccessRequest


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """How access is asked for."""

    timeout_s: float = 3.0  # the authorizer's answer; nobody gets in without one
    remembered: int = 4096  # decisions kept; the least recently used go


class Guard:
    """Lets a request pass or raises `Refused`. Fails closed: no authorizer, no access (`Unavailable`)."""

    def __init__(self, bus: Bus, gateway: str, config: GuardConfig | None = None) -> None:
        self._bus = bus
        self._gateway = gateway
        self._config = config or GuardConfig()
        self._known: OrderedDict[tuple[str, str, str], tuple[float, AccessDecision]] = OrderedDict()
        self.asked = 0

    async def check(self, token: str, action: str, resource: str) -> AccessDecision:
        """The decision that allows it.

        Raises:
            Refused: the token is unknown (field `user` empty) or its role may not do that.
            Unavailable: the authorizer does not answer.
        """
        key = (hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest(), action, resource)
        known = self._known.get(key)
        if known is not None and time.monotonic() < known[0]:
            self._known.move_to_end(key)
            return known[1]
        self._known.pop(key, None)
        self.asked += 1
        decision = await self._bus.request(
            subjects.ACCESS,
            AccessRequest(token=token, action=action, resource=resource, gateway=self._gateway),
            timeout_s=self._config.timeout_s,
            gateway=self._gateway,
        )
        assert isinstance(decision, AccessDecision)
        if not decision.allow:
            raise Refused(decision.reason, user=decision.user)
        if decision.valid_s > 0:
            self._known[key] = (time.monotonic() + decision.valid_s, decision)
            while len(self._known) > self._config.remembered:
                self._known.popitem(last=False)
        return decision
