"""An event loop on its own thread, for callers that have no loop or must not block theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous callers. The thread ends at `stop()`, or with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dmsc-client", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine to its end and return the result. Ctrl-C and the deadline cancel it."""
        from schemas.errors import DeadlineExceeded

        task: asyncio.Task[Any] | None = None
        cancelled = False

        async def run() -> T:
            nonlocal task
            task = asyncio.current_task()
            if cancelled:
                work.close()
                raise asyncio.CancelledError
            return await work

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            if task is not None:
                task.cancel()

        # The task is cancelled, not the future: Ctrl-C may come when the loop already has the coroutine but
        # this thread does not have the future yet.
        try:
            future = asyncio.run_coroutine_threadsafe(run(), self._loop)
            try:
                return future.result(timeout_s)
            except FutureTimeout as error:
                if future.done():
                    raise  # the coroutine itself raised it
                raise DeadlineExceeded(f"not finished within {timeout_s} s") from error
        except BaseException:  # Ctrl-C, or another exception from the caller's signal handlers
            self._loop.call_soon_threadsafe(cancel)
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over an asynchronous iterator. It is closed when the caller leaves the loop early."""

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
