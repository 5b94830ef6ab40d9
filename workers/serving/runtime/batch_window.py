"""Requests that come soon after one another are computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Asked = TypeVar("Asked")


class BatchWindow(Generic[Asked]):
    """Collects what belongs together until its time is up, or there is enough of it.

    While as many batches are answered as can be at a time, what comes goes on being collected: a second batch
    could only wait, and would be smaller. A full one goes at once.

    Args:
        window_s: How long the first one waits for others. Longer: fuller batches, later answers.
        most: Of this size a batch goes at once.
        size: Of what is asked.
        run: Works on a batch. What it returns gives the answers, once the next batch is worked on.
        at_once: Batches that are worked on at a time: one for each stage that they go through.
    """

    def __init__(
        self,
        window_s: float,
        most: int,
        size: Callable[[Asked], int],
        run: Callable[[Sequence[Asked]], Awaitable[Callable[[], None] | None]],
        at_once: int = 1,
    ) -> None:
        self._window_s, self._most, self._size, self._run = window_s, most, size, run
        self._at_once = at_once
        self._open: dict[Hashable, _OpenBatch[Asked]] = {}
        self._due: dict[Hashable, None] = {}
        """Keys of open batches whose time is up, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._working = 0

    def ask(self, key: Hashable, asked: Asked) -> None:
        """Adds to the open batch of this key, or begins one."""
        size = self._size(asked)
        batch = self._open.get(key)
        if batch is not None and batch.size + size > self._most:
            self._close(key)
            batch = None
        if batch is None:
            timer = asyncio.get_running_loop().call_later(self._window_s, self._time_is_up, key)
            batch = self._open[key] = _OpenBatch(timer)
        batch.asked.append(asked)
        batch.size += size
        if batch.size >= self._most:
            self._close(key)

    def _time_is_up(self, key: Hashable) -> None:
        if self._working < self._at_once:
            self._close(key)
        else:
            self._due[key] = None

    def _close(self, key: Hashable) -> None:
        batch = self._open.pop(key)
        self._due.pop(key, None)
        batch.timer.cancel()
        self._working += 1
        task = asyncio.ensure_future(self._answer(batch.asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: Sequence[Asked]) -> None:
        answers = None
        try:
            answers = await self._run(asked)
        finally:
            self._working -= 1
            # Also where full ones of other keys are worked on: else they could keep this one waiting forever.
            if self._due:
                self._close(next(iter(self._due)))
            if answers is not None:
                answers()


@dataclass(slots=True)
class _OpenBatch(Generic[Asked]):
    timer: asyncio.TimerHandle
    asked: list[Asked] = field(default_factory=list)
    size: int = 0
