"""What the bearer of a token may tap (draft §3 AAM): asked at the door, decided by the AAM's table of roles.

The bus itself knows one token, and whoever holds it can listen to everything: docs/tapping.md.
"""

from __future__ import annotations

from bus import subjects
from entities.gateway.guard import Guard
from schemas.door import TapScope
from schemas.errors import Refused

PRIVATE = (
    *(subjects.ACCESS, subjects.DOOR, subjects.DEAD_LETTER, subjects.STORE_QUERY),
    *(
        subjects.USER_COMMAND,
        subjects.EXPLAIN_ACCESS,
        subjects.USER_RECORD,
        subjects.REVOCATION,
        subjects.AUDIT,
    ),
)
"""Who asked for what (Type 3, the doors), bytes that nobody could read, rows of an instance's own store; who
has which tokens, and the audit."""


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
