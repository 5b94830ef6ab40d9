"""Requests that come soon after one another are computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")


class BatchWindow(Generic[Asked]):
    """Collects what belongs together until its time is up, or there is enough of it.

    Args:
        window_s: How long the first one waits for others. Longer: fuller batches, later answers.
        most: Of this size a batch goes at once.
        size: Of what is asked.
        run: Answers a batch.
    """

    def __init__(
        self,
        window_s: float,
        most: int,
        size: Callable[[Asked], int],
        run: Callable[[Sequence[Asked]], Awaitable[None]],
    ) -> None:
        self._window_s, self._most, self._size, self._run = window_s, most, size, run
        self._open: dict[Hashable, tuple[list[Asked], asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, key: Hashable, asked: Asked) -> None:
        """Adds to the open batch of this key, or begins one."""
        if key in self._open:
            waiting, timer = self._open[key]
            if sum(map(self._size, waiting)) + self._size(asked) > self._most:
                self._close(key)
        if key not in self._open:
            timer = asyncio.get_running_loop().call_later(self._window_s, self._close, key)
            self._open[key] = ([], timer)
        waiting, _ = self._open[key]
        waiting.append(asked)
        if sum(map(self._size, waiting)) >= self._most:
            self._close(key)

    def _close(self, key: Hashable) -> None:
        waiting, timer = self._open.pop(key)
        timer.cancel()
        task = asyncio.ensure_future(self._answered(waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, waiting: Sequence[Asked]) -> None:
        await self._run(waiting)
