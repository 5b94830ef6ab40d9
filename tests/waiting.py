"""Waiting for what has no event of its own, and tasks that run beside a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tests.patience import PATIENCE_S

T = TypeVar("T")


async def eventually(
    condition: Callable[[], Any], what: Callable[[], object] | str = "", every_s: float = 0.01
) -> Any:
    """Waits until `condition()` (which may be a coroutine function) is true; its value. `what`: the error.

    It is asked `every_s` at first, then more seldom (`pause`).
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(pause(time.monotonic() - began, every_s))
    except TimeoutError:
        text = what if isinstance(what, str) else what()
        raise AssertionError(f"not within {PATIENCE_S:.0f} s: {text}") from None


def pause(waited_s: float, every_s: float) -> float:
    """Seconds until a condition is asked again: a tenth of the time waited so far.

    Asking a mesh keeps the cores from what is waited for.
    """
    return max(every_s, min(waited_s / 10, 10 * every_s))


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs until the end of the block, if it has not ended by then; its error fails the test."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
