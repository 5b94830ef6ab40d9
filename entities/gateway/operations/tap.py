"""What the bearer of a token may tap (draft §3 AAM): asked at the door, decided by the AAM's table of roles.

It tells a tap that shows a mesh's own credential; one that shows a user's token is held to the same by the
bus's server (`bus.guard.permissions.of_role`): docs/tapping.md.
"""

from __future__ import annotations

from bus.guard.permissions import PRIVATE
from entities.gateway.operations.access_client import Guard
from schemas.door import TapScope
from schemas.errors import Refused


class TapDesk:
    """Tells; it holds nobody back by itself."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def scope(self, token: str) -> TapScope:
        """
        Raises:
            Refused: nobody's token, or its role may not tap at all.
        """
        access = await self._guard.check(token, "tap.read", "bus")
        try:
            await self._guard.check(token, "tap.private", "bus")
        except Refused:
            hidden = tuple(row.name for row in PRIVATE)
            return TapScope(user=access.user, role=access.role, everything=False, hidden=hidden)
        return TapScope(user=access.user, role=access.role, everything=True)
