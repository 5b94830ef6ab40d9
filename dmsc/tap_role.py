"""A tap of somebody with a role: what the door lets them see, and what is then left out here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bus import subjects, tap_pattern
from schemas.door import TapScope
from schemas.errors import Refused, Unavailable

PATIENCE_S = 3.0
"""How long a gateway is looked for; a tap is wanted most when something is down."""


def given_token(token: str | None) -> str | None:
    """The user's own token. That of a state folder does not count: who reads it reads the bus's as well."""
    return token or os.environ.get("DMSC_TOKEN") or None


async def ask(gateway: str | None, token: str, state: Path | None) -> TapScope:
    """What the bearer may tap, from a gateway.

    Raises:
        Refused: nothing, or nobody's token.
        Unavailable: no gateway answers; without one there is no role.
    """
    from dmsc.async_client import AsyncClient

    try:
        async with AsyncClient(gateway, token=token, state=state, patience_s=PATIENCE_S) as client:
            return await client.tap_scope()
    except Unavailable as error:
        raise Unavailable(
            f"{error.text} (asked what your token may tap; without --token and DMSC_TOKEN the bus's decides)"
        ) from error


def may(scope: TapScope) -> Callable[[str], bool] | None:
    """Whether a subject may be shown; None where all may."""
    if scope.everything:
        return None
    hidden = frozenset(scope.hidden)

    def allowed(subject: str) -> bool:
        found = subjects.lookup(subject)
        return found is not None and found[0].name not in hidden

    return allowed


def left_out(scope: TapScope, patterns: Sequence[str]) -> list[str]:
    """Names of the rows among `patterns` that this role does not see.

    Raises:
        Refused: a pattern has nothing else.
    """
    hidden = frozenset(scope.hidden)
    found: list[str] = []
    for typed in [] if scope.everything else patterns:
        rows = tap_pattern.rows(tap_pattern.complete(typed))
        names = [row.name for row in rows if row.name in hidden]
        if len(names) == len(rows):
            what = ", ".join(names) or "subjects that are not in the table"
            raise Refused(f"{scope.role} {scope.user} may not tap {typed!r} ({what}): ask an operator")
        found += names
    return list(dict.fromkeys(found))
