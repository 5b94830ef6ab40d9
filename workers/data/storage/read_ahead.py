"""Samples whose bytes are fetched before they are asked for, along the order, by a few threads."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadConfig:
    """How much is fetched ahead."""

    threads: int = 8
    """Requests at a time: as many as hide the store's delay."""
    most_bytes: int = 64 << 20
    """Of samples that are here and were not asked for yet."""
    most_samples: int = 4096
    """Samples that are expected at a time; later ones are fetched when they are asked for."""
    forgotten_after: int = 2048
    """A sample that was expected so many samples before the one that is asked for was somebody else's."""


@dataclass(slots=True)
class _Expected:
    number: int
    future: Future[bytes] | None = None
    bytes: int = 0
    """Of the sample, once it is here."""
    forgotten: bool = False


class ReadAhead:
    """Fetches expected samples. Errors are raised to whoever takes the sample.

    Args:
        read: The bytes of the sample at an index; any thread may call it.
        config: Bounds.
    """

    def __init__(self, read: Callable[[int], bytes], config: ReadAheadConfig = ReadAheadConfig()) -> None:
        self._read = read
        self._config = config
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="read-ahead")
        self._lock = threading.Lock()
        self._expected: OrderedDict[int, _Expected] = OrderedDict()
        self._waiting: deque[int] = deque()
        self._bytes = 0
        self._running = 0
        self._mean_bytes = 0.0
        self._number = 0
        self._closed = False

    def expect(self, indices: Sequence[int]) -> None:
        """These samples are needed soon, in this order. Returns at once."""
        with self._lock:
            for index in indices:
                if index in self._expected or len(self._expected) >= self._config.most_samples:
                    continue
                self._expected[index] = _Expected(self._number)
                self._number += 1
                self._waiting.append(index)
            self._start()

    def take(self, index: int) -> bytes:
        """The bytes of a sample, fetched before or now. Raises what reading raises."""
        with self._lock:
            expected = self._expected.pop(index, None)
            future = expected.future if expected is not None else None
            if expected is not None:
                self._forget_before(expected.number - self._config.forgotten_after)
        if future is None or future.cancel():
            self._ended(future)
            return self._read(index)
        assert expected is not None
        try:
            return future.result()
        finally:
            with self._lock:
                self._bytes -= expected.bytes
                self._start()

    @property
    def ready_bytes(self) -> int:
        """Bytes of samples that are here and were not taken."""
        with self._lock:
            return self._bytes

    def close(self) -> None:
        """Fetches nothing more. Idempotent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._expected.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, cancelled: Future[bytes] | None) -> None:
        with self._lock:
            if cancelled is not None:
                self._running -= 1
            self._start()

    def _start(self) -> None:
        """Starts what fits into the bound, in order. The lock is held."""
        while (
            self._waiting
            and not self._closed
            and self._running < self._config.threads
            and self._bytes + (self._running + 1) * self._mean_bytes <= self._config.most_bytes
        ):
            expected = self._expected.get(index := self._waiting.popleft())
            if expected is None or expected.future is not None:
                continue
            self._running += 1
            expected.future = self._threads.submit(self._fetch, index, expected)

    def _fetch(self, index: int, expected: _Expected) -> bytes:
        fetched = 0
        try:
            data = self._read(index)
            fetched = len(data)
            return data
        finally:
            with self._lock:
                self._running -= 1
                if not expected.forgotten:
                    expected.bytes = fetched
                    self._bytes += fetched
                self._mean_bytes = 0.9 * self._mean_bytes + 0.1 * fetched
                self._start()

    def _forget_before(self, number: int) -> None:
        """Drops samples that were expected before this one and never taken. The lock is held."""
        while self._expected:
            index, oldest = next(iter(self._expected.items()))
            if oldest.number >= number:
                return
            del self._expected[index]
            oldest.forgotten = True
            self._bytes -= oldest.bytes
            if oldest.future is not None and oldest.future.cancel():
                self._running -= 1
