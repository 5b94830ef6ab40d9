"""First stage: the tokens that last stages publish, of whichever owners sessions have there."""

from __future__ import annotations

from collections.abc import Callable

from bus.connection import Bus
from bus.messaging.handlers import Subscription
from bus.subjects import WAVE_TOKENS
from schemas.envelope import Envelope
from schemas.services.generation import WaveTokens


class TokenFeed:
    """Listens to each owner once.

    Args:
        bus: A connected bus.
        job: The version's job.
        heard: Takes each message, on the event loop.
    """

    def __init__(self, bus: Bus, job: str, heard: Callable[[WaveTokens], None]) -> None:
        self._bus, self._job, self._heard = bus, job, heard
        self._subscriptions: dict[str, Subscription] = {}

    async def listen_to(self, sid: str) -> None:
        """Listens to this instance from now on. Idempotent."""
        if sid in self._subscriptions:
            return
        made = await self._bus.subscribe(WAVE_TOKENS, self._on_tokens, job=self._job, sid=sid)
        if sid in self._subscriptions:  # another session was bound meanwhile
            await made.stop(drain=False)
        else:
            self._subscriptions[sid] = made

    async def _on_tokens(self, message: WaveTokens, _: Envelope) -> None:
        self._heard(message)

    async def close(self) -> None:
        """Stops listening. Idempotent."""
        while self._subscriptions:
            _, subscription = self._subscriptions.popitem()
            await subscription.stop(drain=False)
