"""How long somebody has waited: time in which several wait at once counts once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StallClock:
    """Seconds in which at least one waits. For one thread.

    Args:
        clock: Seconds, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._since = 0.0
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """One more waits until the end of the block."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._seconds += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """So far, that of those who wait now included."""
        return self._seconds + (self._clock() - self._since if self._waiting else 0.0)
