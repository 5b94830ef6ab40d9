"""Batches made ahead, on a thread of their own."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from workers.data.batches import Batch, BatchSource, Split, counted


class Prefetcher:
    """Makes expected batches ahead, on one thread.

    At most `capacity` are kept ready, and about `most_bytes`. Batches are needed in the order in which they
    are expected, so one that finds all places taken is made when it is needed.

    Args:
        source: What makes the batches. It is closed with the prefetcher.
        capacity: Batches kept ready, each of which lies in memory.
        most_bytes: Of all of them, if each is as large as the largest so far; one is kept in any case.
    """

    def __init__(self, source: BatchSource, *, capacity: int = 64, most_bytes: int = 1 << 30) -> None:
        self._source = source
        self._capacity = capacity
        self._most_bytes = most_bytes
        self._batch_bytes = 1
        self._ahead: dict[tuple[Split, int, int], Future[tuple[Batch, int]]] = {}
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        """Makes a batch ahead that will probably be needed soon. Call it on the thread that calls `get`."""
        key = (split, step, microbatch)
        if key in self._ahead:
            return
        capacity = min(self._capacity, max(1, self._most_bytes // self._batch_bytes))
        if len(self._ahead) >= capacity:
            self._drop_others(step)
        if len(self._ahead) < capacity:
            self._source.expect(*key)
            self._ahead[key] = self._thread.submit(self._made, *key)

    def _made(self, split: Split, step: int, microbatch: int) -> tuple[Batch, int]:
        return counted(self._source, lambda: self._source.batch(split, step, microbatch))

    def _drop_others(self, step: int) -> None:
        """Frees the places of batches that nobody asks for.

        Those of past steps went to other instances; later ones were expected before the job went back to a
        checkpoint.
        """
        for key in [key for key in self._ahead if abs(key[1] - step) > 1]:
            self._ahead.pop(key).cancel()

    async def get(self, split: Split, step: int, microbatch: int) -> tuple[Batch, int]:
        """The batch, made ahead or now, and how many of its samples are in an unreadable one's place."""
        key = (split, step, microbatch)
        future = self._ahead.pop(key, None) or self._thread.submit(self._made, *key)
        batch, replaced = future.result() if future.done() else await asyncio.wrap_future(future)
        self._batch_bytes = max(self._batch_bytes, sum(tensor.nbytes for tensor in batch.values()))
        return batch, replaced

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
