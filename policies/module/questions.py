"""The synchronous output of a functional module (draft §4.2, Figure 2): queries over the bus.

Each version answers at its own subject; the active version also answers at `active`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bus import subjects
from bus.connection import Bus
from bus.messaging.handlers import Subscription
from policies.kit.policy import Policy
from schemas.envelope import Envelope
from schemas.module_status import ACTIVE, ModuleAnswer, ModuleQuestion, version_token

CONCURRENCY = 8
"""Most questions that are being answered or wait; the policy answers one after the other."""


class ModuleQuestions:
    """Serves one module's questions with `answer`."""

    def __init__(
        self, bus: Bus, policy: Policy, answer: Callable[[ModuleQuestion], Awaitable[ModuleAnswer]]
    ) -> None:
        self._bus = bus
        self._policy = policy
        self._ask = answer
        self._own: Subscription | None = None
        self._active: Subscription | None = None

    async def serve(self, *, active: bool) -> None:
        """Subscribes; called again when the module becomes active or ceases to be."""
        if self._own is None:
            self._own = await self._subscribe(version_token(self._policy.version))
        if active and self._active is None:
            self._active = await self._subscribe(ACTIVE)
        elif not active and self._active is not None:
            former, self._active = self._active, None
            await former.stop(drain=False)

    async def stop(self) -> None:
        for subscription in (self._own, self._active):
            if subscription is not None:
                await subscription.stop(drain=False)
        self._own = self._active = None

    async def _subscribe(self, version: str) -> Subscription:
        return await self._bus.serve(
            subjects.MODULE_QUESTION,
            self._answer,
            concurrency=CONCURRENCY,
            queue_group=self._policy.name,
            module=self._policy.name,
            version=version,
        )

    async def _answer(self, message: ModuleQuestion, envelope: Envelope) -> ModuleAnswer:
        return await self._ask(message)
