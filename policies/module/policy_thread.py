"""The thread on which a policy's code runs, so that a call that never returns stops nothing else."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

Returned = TypeVar("Returned")


class PolicyThread:
    """Runs calls one after the other on a daemon thread.

    Unlike an executor's threads it is a daemon: a policy that never returns must not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"policy {name}", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], Returned]) -> Returned:
        """The call's result or exception. Cancelling the wait does not end the call."""
        future: Future[Returned] = Future()

        def carry_out() -> None:
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(carry_out)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Lets the thread end after its present call. Idempotent."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            with suppress(Exception):  # the waiting task, and perhaps its loop, has ended
                call()
