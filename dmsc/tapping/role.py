"""A tap of somebody with a role: whose token counts, and what a gateway says that it lets them see."""

from __future__ import annotations

import os
from pathlib import Path

from schemas.door import TapScope
from schemas.errors import Unavailable

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
    from dmsc.client.async_client import AsyncClient

    try:
        async with AsyncClient(gateway, token=token, state=state, patience_s=PATIENCE_S) as client:
            return await client.tap_scope()
    except Unavailable as error:
        raise Unavailable(
            f"{error.text} (asked what your token may tap; without --token and DMSC_TOKEN the bus's decides)"
        ) from error
