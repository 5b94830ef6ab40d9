"""Work that goes on beside a block of code, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(
    *work: Coroutine[Any, Any, object], name: str | None = None
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run these coroutines as tasks during the block, which gets the tasks, and cancel them at its end.

    Their errors are not raised: what goes on in the background reports them itself.
    """
    tasks = [asyncio.create_task(coroutine, name=name) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
