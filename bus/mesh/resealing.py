"""Seals stored secrets again when the keys of kinds change: at a start, and after a rotation of the root."""

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
    """Calls each of `seals` at its start, and after each reconnect with other keys of `kind`.

    On an unguarded bus there are no keys to seal to, so it calls none.
    """

    def __init__(self, bus: Bus, kind: EntityKind, *seals: Callable[[], Awaitable[Any]]) -> None:
        self._bus = bus
        self._kind = kind
        self._seals = seals
        self._sealed_to = ""
        self._remove: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Calls the seals for the first time and subscribes to reconnects.

        Raises:
            Exception: whatever a seal raises.
        """
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
        except DmscError as error:  # the next reconnect or start tries again
            log.warning("not sealed anew yet", kind=self._kind, reason=error.text)

    async def _seal(self, key: str) -> None:
        for seal in self._seals if key else ():
            await seal()
