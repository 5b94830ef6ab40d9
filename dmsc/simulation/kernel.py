"""A virtual clock and its queue of events.

`dmsc simulate` and `tests/sim` run on it. The cores take time as an argument, so nothing ever really waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Kernel:
    """Runs events in order of time; events at the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""
        self.events = 0
        """The number of events that have run."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._stopped = False

    def __len__(self) -> int:
        """The number of waiting events."""
        return len(self._heap)

    @property
    def due_s(self) -> float:
        """The time of the next event; infinite if none waits."""
        return self._heap[0][0] if self._heap else math.inf

    def after(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> None:
        """Schedule `work(*arguments)` in `delay_s` ≥ 0 virtual seconds."""
        self._scheduled = scheduled = self._scheduled + 1
        heappush(self._heap, (self.now + delay_s, scheduled, work, arguments))

    def step(self) -> bool:
        """Run the next event. Returns False if none waits."""
        if not self._heap:
            return False
        self.now, _, work, arguments = heappop(self._heap)
        self.events += 1
        work(*arguments)
        return True

    def stop(self) -> None:
        """Stop after the current event; the clock then stands still."""
        self._stopped = True

    def run(self, until_s: float) -> None:
        """Run all events due up to `until_s`. The clock is then at `until_s`, unless `stop` was called."""
        heap, events = self._heap, 0
        while heap and heap[0][0] <= until_s and not self._stopped:
            self.now, _, work, arguments = heappop(heap)
            events += 1
            work(*arguments)
        self.events += events
        if not self._stopped:
            self.now = until_s
