"""Asking a mesh in which whoever answers may just have been killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import DmscError

END_S = 60.0
"""How long the mesh may take after the job's end until it answers again: its gateways may be dead."""
LOOK_EVERY_S = 0.05

T = TypeVar("T")


async def persistently(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks until it is answered, at most `END_S`: the mesh may just be coming back."""
    deadline = time.monotonic() + END_S
    while True:
        try:
            return await ask()
        except DmscError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
        await asyncio.sleep(LOOK_EVERY_S)
