"""Background tasks of an owner; the first failure of one ends what the owner waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, NoReturn, TypeVar

from bus.tasks import TaskSet, cancel

T = TypeVar("T")


class GuardedTasks:
    """Tasks that are started with `spawn` and ended with `close`; the owner waits with `unless_failed`.

    Unlike a TaskGroup it does not cancel its owner: a failure is raised where the owner waits next, so that
    the owner can handle it there.
    """

    def __init__(self) -> None:
        self._tasks = TaskSet(lambda task, error: self.fail(error))
        self._closed = False
        self._failure: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    @property
    def failed(self) -> bool:
        return self._failure.done()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task; after `close` it is cancelled before it begins."""
        task = self._tasks.create(work)
        if self._closed:
            task.cancel()
        return task

    def fail(self, error: BaseException) -> None:
        """Notes a failure as if a task had failed; only the first failure counts."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # marks it as retrieved, even if nobody waits just now

    async def unless_failed(self, work: Awaitable[T]) -> T:
        """Waits for `work`; on a failure it cancels `work` and raises the failure."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return self._failure.result()
        finally:
            if not task.done():
                await cancel(task)

    async def close(self) -> None:
        """Cancels all tasks, also those that they start meanwhile, and waits for their end. Twice is fine."""
        self._closed = True
        self._tasks.cancel_all()
        await self._tasks.wait()
