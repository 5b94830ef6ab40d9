"""Route identifiers (draft §4.4(1)): small numbers, given out again once they are free."""

from __future__ import annotations

import heapq


class RouteIds:
    """Allocates the lowest free route id, from 1 (draft §4.4(1): routing identifiers).

    Takes memory for those that are in use or were, whatever numbers are wanted: those come from records
    that others send.
    """

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._free: list[int] = []  # below `_next` and released; each once
        self._listed: set[int] = set()  # what stands in `_free`
        self._next = 1

    def take(self, wanted: int = 0) -> int:
        """`wanted` if it is free and above 0, else the lowest free one."""
        if wanted > 0 and wanted not in self._used:
            self._used.add(wanted)
            return wanted
        while self._free:
            lowest = heapq.heappop(self._free)
            self._listed.discard(lowest)
            if lowest not in self._used:
                self._used.add(lowest)
                return lowest
        while self._next in self._used:
            self._next += 1
        number = self._next
        self._next += 1
        self._used.add(number)
        return number

    def release(self, number: int) -> None:
        """Gives it back; twice is fine."""
        if number not in self._used:
            return
        self._used.remove(number)
        if number < self._next and number not in self._listed:
            self._listed.add(number)
            heapq.heappush(self._free, number)
