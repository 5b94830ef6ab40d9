"""The one thread that computes: tasks by priority, results back on the event loop.

Blocking torch calls run here, so that heartbeats and hops go on meanwhile. Because backward passes run before
forward ones, the order 1F1B results without a schedule (DESIGN §6).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from bus.wire.request_progress import ThreadProgress

T = TypeVar("T")


class Priority(IntEnum):
    """Smaller runs first. ORDER is for the orchestrator's orders: prepare, commit, clear.

    BESIDE is for what training does not wait for: it runs when there is nothing else to do.
    """

    ORDER = 0
    BACKWARD = 1
    FORWARD = 2
    BESIDE = 3


_KEPT = (Priority.ORDER, Priority.BESIDE)


class ComputeThread:
    """A named daemon thread with a heap of tasks. Use it with `async with`."""

    def __init__(self, name: str = "compute") -> None:
        self._heap: list[tuple[int, int, Callable[[], Any], asyncio.Future[Any]]] = []
        self._ready = threading.Condition()
        self._order = itertools.count()
        self._stopping = False
        self._busy_s = 0.0
        self._present: tuple[int, float] | None = None  # priority and begin of the task at hand
        self.done = 0
        """Tasks that it has finished, whether or not they failed."""
        self.computed = ThreadProgress()
        """The thread's computing time so far: the progress of an order while nothing else computes."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def __aenter__(self) -> ComputeThread:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._ready:
            self._stopping = True
            self._ready.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def submit(self, priority: Priority, task: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `task`; the future gets its result or exception on the event loop."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._ready:
            heapq.heappush(self._heap, (priority, next(self._order), task, future))
            self._ready.notify()
        return future

    def order(self, task: Callable[[], T]) -> asyncio.Future[T]:
        """Queues a task of the orchestrator's before all microbatches; see `submit`."""
        return self.submit(Priority.ORDER, task)

    async def beside(self, task: Callable[[], T], patience_s: float) -> tuple[T, float]:
        """Runs `task` when nothing else waits; after `patience_s` in vain before all else.

        Returns its result, and the processor's seconds that it took.
        """
        begun = False

        def once() -> tuple[T, float] | None:
            nonlocal begun
            if begun:
                return None
            begun, at = True, time.thread_time()
            return task(), time.thread_time() - at

        waiting = self.submit(Priority.BESIDE, once)
        await asyncio.wait([waiting], timeout=patience_s)
        if begun or (found := await self.order(once)) is None:
            found = await waiting
        assert found is not None
        return found

    def purge(self) -> None:
        """Drops waiting microbatches; the running task is not interrupted."""
        with self._ready:
            dropped = [entry for entry in self._heap if entry[0] not in _KEPT]
            self._heap = [entry for entry in self._heap if entry[0] in _KEPT]
            heapq.heapify(self._heap)
        for *_, future in dropped:
            future.cancel()

    @property
    def waiting(self) -> int:
        return len(self._heap)

    @property
    def busy_s(self) -> float:
        """Seconds spent computing since the start."""
        return self._busy_s

    @property
    def computing_ms(self) -> float:
        """How long it is at its present task; 0: it has none."""
        present = self._present
        return 0.0 if present is None else (time.perf_counter() - present[1]) * 1e3

    @property
    def obeys(self) -> bool:
        """Whether its present task is an order of the orchestrator."""
        present = self._present
        return present is not None and present[0] == Priority.ORDER

    def _work(self) -> None:
        self.computed.begin()
        try:
            self._compute()
        finally:
            self.computed.end()

    def _compute(self) -> None:
        while True:
            with self._ready:
                while not self._heap and not self._stopping:
                    self._ready.wait()
                if self._stopping:
                    return
                priority, _, task, future = heapq.heappop(self._heap)
            began = time.perf_counter()
            self._present = (priority, began)
            try:
                result, error = task(), None
            except BaseException as caught:  # delivered to the awaiting task; this thread must live on
                result, error = None, _harmless(caught)
            self._busy_s += time.perf_counter() - began
            self._present, self.done = None, self.done + 1
            task = None  # type: ignore[assignment]  # drop the closure's tensors before waiting again
            self._loop.call_soon_threadsafe(_deliver, future, result, error)
            del result, error, future


def _harmless(error: BaseException) -> Exception:
    """An error that a future can carry: no StopIteration, nothing that ends the event loop (`sys.exit()`)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    harmless = RuntimeError(f"{type(error).__name__} raised: {error}")
    return harmless.with_traceback(error.__traceback__)


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
