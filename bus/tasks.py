"""Background tasks: a set that an owner ends, one that a block ends, and an end that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

TaskFailure = Callable[[asyncio.Task[Any], BaseException], None]


class TaskSet:
    """The running background tasks of an owner: `tasks.create(work())`, and at the end `await tasks.close()`.

    It keeps each task referenced until the task has ended, as asyncio demands. Unlike a TaskGroup it needs no
    block and does not end its owner when a task fails. `on_failure` is called with a task that has failed and
    its error; without it, asyncio reports an error that nobody has retrieved.
    """

    def __init__(self, on_failure: TaskFailure | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def __contains__(self, task: object) -> bool:
        return task in self._tasks

    def create(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Starts a task; the set forgets it when it has ended."""
        task = asyncio.create_task(work, name=name)
        self.add(task)
        return task

    def add(self, task: asyncio.Task[Any]) -> None:
        """Takes over a task that somebody else has started."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def cancel_all(self) -> None:
        """Asks all tasks to end, without waiting for them."""
        for task in self:
            task.cancel()

    async def wait(self) -> None:
        """Returns once no task runs any more, those included that were started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancels all tasks but the calling one, and waits for their end. Twice is fine."""
        await cancel(*(task for task in self if task is not asyncio.current_task()))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_failure is None or task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._on_failure(task, error)


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancels these tasks and waits for their end, whatever their outcome; None stands for no task."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def background(
    work: Coroutine[Any, Any, T], *, name: str | None = None
) -> AsyncIterator[asyncio.Task[T]]:
    """Runs `work` beside the block, and ends it with the block; its outcome is for whoever asks the task."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        await cancel(task)
