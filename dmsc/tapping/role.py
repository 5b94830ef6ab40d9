"""A user's role for a tap: which token is used, and what a gateway permits its user to see."""

from __future__ import annotations

import os
from pathlib import Path

from schemas.door import TapScope
from schemas.errors import Unavailable

PATIENCE_S = 3.0
"""Seconds to look for a gateway; short, because a tap is needed most when something is down."""


def given_token(token: str | None) -> str | None:
    """The user's own token, from the option or the environment.

    The token in a state folder is ignored: whoever can read it can also read the bus's root there.
    """
    return token or os.environ.get("DMSC_TOKEN") or None


async def ask(gateway: str | None, token: str, state: Path | None) -> TapScope:
    """Ask a gateway what the token's user may tap.

    Raises:
        Refused: The user may tap nothing, or the token is invalid.
        Unavailable: No gateway answers, so the role is unknown.
    """
    from dmsc.client.async_client import AsyncClient

    try:
        async with AsyncClient(gateway, token=token, state=state, patience_s=PATIENCE_S) as client:
            return await client.tap_scope()
    except Unavailable as error:
        raise Unavailable(
            f"{error.text} (asked what your token may tap; without --token and DMSC_TOKEN the bus's decides)"
        ) from error
