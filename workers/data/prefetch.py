"""Batches made ahead, on a thread of their own."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from workers.data.batches import Batch, BatchSource, Split


class Prefetcher:
    """Makes expected batches ahead, on one thread.

    At most `capacity` are kept ready. Batches are needed in the order in which they are expected, so one that
    finds all places taken is made when it is needed.

    Args:
        source: What makes the batches. It is closed with the prefetcher.
        capacity: Batches kept ready, each of which lies in memory.
    """

    def __init__(self, source: BatchSource, *, capacity: int = 64) -> None:
        self._source = source
        self._capacity = capacity
        self._ahead: dict[tuple[Split, int, int], Future[Batch]] = {}
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        """Makes a batch ahead that will probably be needed soon. Call it on the thread that calls `get`."""
        key = (split, step, microbatch)
        if key in self._ahead:
            return
        if len(self._ahead) >= self._capacity:
            self._drop_before(step - 1)
        if len(self._ahead) < self._capacity:
            self._source.expect(*key)
            self._ahead[key] = self._thread.submit(self._source.batch, *key)

    def _drop_before(self, step: int) -> None:
        """Drops batches of past steps, which were dispatched to other instances, to free their places."""
        for key in [key for key in self._ahead if key[1] < step]:
            self._ahead.pop(key).cancel()

    async def get(self, split: Split, step: int, microbatch: int) -> Batch:
        """The batch, made ahead or now."""
        key = (split, step, microbatch)
        future = self._ahead.pop(key, None) or self._thread.submit(self._source.batch, *key)
        return await asyncio.wrap_future(future)

    @property
    def waiting(self) -> int:
        return len(self._ahead)

    def close(self) -> None:
        """Drops the batches made ahead; closes the source after the one in hand. Idempotent."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        if not self._closed:
            self._closed = True
            self._thread.submit(self._source.close)
            self._thread.shutdown(wait=False)
