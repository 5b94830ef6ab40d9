"""A user's role for a tap: which token is used, and what a gateway permits its user to see."""

from __future__ import annotations

import os

from dmsc.console.option_groups import GatewayOptions
from schemas.errors import Unavailable
from schemas.gateway_api import TapScope


def given_token(token: str | None) -> str | None:
    """The user's own token, from the option or the environment.

    The token in a state folder is ignored: whoever can read it can also read the bus's root there.
    """
    return token or os.environ.get("DMSC_TOKEN") or None


async def ask(mesh: GatewayOptions, *, patience_s: float = 3.0) -> TapScope:
    """Ask a gateway what the user of its token may tap.

    It looks for a gateway for `patience_s` only, because a tap is needed most when something is down.

    Raises:
        Refused: The user may tap nothing, or the token is invalid.
        Unavailable: No gateway answers, so the role is unknown.
    """
    try:
        async with mesh.client(patience_s=patience_s) as client:
            return await client.tap_scope()
    except Unavailable as error:
        raise Unavailable(
            f"{error.text} (asked what your token may tap; without --token and DMSC_TOKEN the bus's decides)"
        ) from error
