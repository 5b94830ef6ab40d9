"""Repeats a request to a mesh whose answering process may just have been killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import DmscError

END_S = 60.0
"""Seconds within which the mesh must answer again after the job's end; its gateways may be dead."""
LOOK_EVERY_S = 0.05

T = TypeVar("T")


async def persistently(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request until it is answered, for at most `END_S`, as long as its errors are retryable."""
    deadline = time.monotonic() + END_S
    while True:
        try:
            return await ask()
        except DmscError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
        await asyncio.sleep(LOOK_EVERY_S)
