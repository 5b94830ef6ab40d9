"""The first of several answers, or all that come in time. Who is too late is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from schemas.errors import DmscError, Unavailable

T = TypeVar("T")
Ask = Callable[[], Awaitable[T]]


async def hedged(
    asks: Sequence[Ask[T]], after_s: float, drop: Callable[[T], None] = lambda _: None
) -> tuple[int, T]:
    """Which of the asks answered first, and its answer.

    The first one is asked at once. Each time `after_s` seconds pass, or one fails that another may not fail
    at, the next one is asked beside it. `drop` gets answers that came too late, or that nobody waits for any
    more.

    Raises:
        DmscError: what fails everywhere (a wrong request), or the first failure once all have failed.
    """
    waiting = list(enumerate(asks))
    running: dict[asyncio.Task[T], int] = {}
    failed: DmscError | None = None
    won: list[T] = []
    try:
        while waiting or running:
            if waiting:
                number, ask = waiting.pop(0)
                running[asyncio.create_task(_asked(ask))] = number
            timeout_s = after_s if waiting else None
            done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: running[each]):
                if (error := task.exception()) is None:
                    won.append(task.result())
                    return running.pop(task), won[0]
                del running[task]
                if not isinstance(error, DmscError) or not error.retryable:
                    raise error
                failed = failed or error
        raise failed or Unavailable("there is nobody to ask")
    finally:
        for task in running:
            task.add_done_callback(partial(_give_back, drop))
        try:
            await _cancelled(running)
        except asyncio.CancelledError:  # whoever asked left meanwhile
            for answer in won:
                drop(answer)
            raise


async def gathered(asks: Mapping[str, Ask[T]], wait_s: float) -> tuple[dict[str, T], dict[str, DmscError]]:
    """The answers that come within `wait_s` seconds, by name, and the errors of those that fail."""
    running = {asyncio.create_task(_asked(ask)): name for name, ask in asks.items()}
    answers: dict[str, T] = {}
    errors: dict[str, DmscError] = {}
    try:
        done, _ = await asyncio.wait(running, timeout=wait_s) if running else (set(), set())
        for task in done:
            name = running.pop(task)
            error = task.exception()
            if error is None:
                answers[name] = task.result()
            elif isinstance(error, DmscError):
                errors[name] = error
            else:
                raise error
    finally:
        await _cancelled(running)
    return answers, errors


async def _asked(ask: Ask[T]) -> T:
    return await ask()


def _give_back(drop: Callable[[T], None], task: asyncio.Task[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        drop(task.result())


async def _cancelled(running: Mapping[asyncio.Task[T], object]) -> None:
    """Cancels the tasks, and waits until they have ended."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
