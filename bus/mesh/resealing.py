"""What is kept sealed is sealed anew when the kinds' keys change: at a start, and for a new root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bus.logs import get_logger
from schemas.envelope import EntityKind
from schemas.errors import DmscError

if TYPE_CHECKING:
    from bus.connection import Bus

log = get_logger("bus.security.sealing")


class Resealing:
    """Calls each of `seals` when it starts, and after each reconnect with other keys of `kind`.

    Without a guard there are no keys to seal to: then it calls none."""

    def __init__(self, bus: Bus, kind: EntityKind, *seals: Callable[[], Awaitable[Any]]) -> None:
        self._bus = bus
        self._kind = kind
        self._seals = seals
        self._sealed_to = ""
        self._remove: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Raises whatever a seal raises, this first time."""
        self._sealed_to = self._bus.keyring.of_kind(self._kind)
        self._remove()
        self._remove = self._bus.on_reconnect(self._again)
        await self._seal(self._sealed_to)

    def stop(self) -> None:
        self._remove()

    async def _again(self) -> None:
        key = self._bus.keyring.of_kind(self._kind)
        if key == self._sealed_to:
            return
        try:
            await self._seal(key)
            self._sealed_to = key
        except DmscError as error:  # the next reconnect, or start, does it
            log.warning("not sealed anew yet", kind=self._kind, reason=error.text)

    async def _seal(self, key: str) -> None:
        for seal in self._seals if key else ():
            await seal()
