"""Tasks that run beside a block of code and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, Any], name: str | None = None) -> AsyncIterator[None]:
    """Run these coroutines as tasks until the block ends; then cancel them and wait for their end."""
    tasks = [asyncio.create_task(item, name=name) for item in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
