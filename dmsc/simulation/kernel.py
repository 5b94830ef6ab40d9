"""A virtual clock and the one queue of what will happen.

`dmsc simulate` and `tests/sim` run on it: the cores take time as an argument, so nothing here ever waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Kernel:
    """Events in order of time; those at the same time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""
        self.events = 0
        """How many have happened."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._stopped = False

    def __len__(self) -> int:
        """Events that wait."""
        return len(self._heap)

    @property
    def due_s(self) -> float:
        """When the next event happens; infinite when nothing waits."""
        return self._heap[0][0] if self._heap else math.inf

    def after(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> None:
        """Calls `work(*arguments)` in `delay_s` ≥ 0 virtual seconds."""
        self._scheduled = scheduled = self._scheduled + 1
        heappush(self._heap, (self.now + delay_s, scheduled, work, arguments))

    def step(self) -> bool:
        """Lets the next event happen; False when nothing waits."""
        if not self._heap:
            return False
        self.now, _, work, arguments = heappop(self._heap)
        self.events += 1
        work(*arguments)
        return True

    def stop(self) -> None:
        """Nothing happens any more after the present event, and the clock stands."""
        self._stopped = True

    def run(self, until_s: float) -> None:
        """Lets happen what is due up to `until_s`; that is the time then, unless `stop` was called."""
        heap, events = self._heap, 0
        while heap and heap[0][0] <= until_s and not self._stopped:
            self.now, _, work, arguments = heappop(heap)
            events += 1
            work(*arguments)
        self.events += events
        if not self._stopped:
            self.now = until_s
