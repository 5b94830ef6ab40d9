"""Repeats a request to a mesh whose answering process may just have been killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import DmscError

T = TypeVar("T")


async def persistently(
    ask: Callable[[], Awaitable[T]], *, within_s: float = 60.0, every_s: float = 0.05
) -> T:
    """Repeat a request until it is answered, for at most `within_s`, as long as its errors are retryable."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await ask()
        except DmscError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
        await asyncio.sleep(every_s)
