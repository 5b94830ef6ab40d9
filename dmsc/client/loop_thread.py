"""An event loop on a thread of its own, for callers that have none or whose own must not be blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous callers. The thread ends with `stop()` (or with the process)."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dmsc-client", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run to the end and return the result. Ctrl-C and the deadline cancel the coroutine."""
        from schemas.errors import DeadlineExceeded

        task: asyncio.Task[Any] | None = None
        given_up = False

        async def run() -> T:
            nonlocal task
            task = asyncio.current_task()
            if given_up:
                work.close()
                raise asyncio.CancelledError
            return await work

        def give_up() -> None:
            nonlocal given_up
            given_up = True
            if task is not None:
                task.cancel()

        # Cancelled by way of the task, not of the future: Ctrl-C may come when the loop has the work
        # already and this thread not yet the future.
        try:
            future = asyncio.run_coroutine_threadsafe(run(), self._loop)
            try:
                return future.result(timeout_s)
            except FutureTimeout as error:
                if future.done():
                    raise  # the coroutine's own
                raise DeadlineExceeded(f"not finished within {timeout_s} s") from error
        except BaseException:  # Ctrl-C, or whatever else a signal handler of the caller's raises
            self._loop.call_soon_threadsafe(give_up)
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Step an asynchronous iterator; leaving the loop early closes it."""

        stepping: asyncio.Task[Any] | None = None

        async def step() -> T:
            nonlocal stepping
            stepping = asyncio.current_task()
            return await anext(items)

        async def close() -> None:
            if stepping is not None and not stepping.done():  # the caller was interrupted while it waited
                await asyncio.wait({stepping})  # cancelled by `call`
            closing = getattr(items, "aclose", None)
            if closing is not None:
                await closing()

        try:
            while True:
                try:
                    yield self.call(step())
                except StopAsyncIteration:
                    return
        finally:
            if self.running:
                self.call(close())

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
