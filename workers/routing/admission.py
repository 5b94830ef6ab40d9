"""The rate at which one sender admits microbatches to a stage (ADR-0101). Pure.

A rate caps the heat of devices, the load of a link or the power of a job, where a window can't: a window
bounds what is open, and instances work as fast as they can all the same.
"""

from __future__ import annotations


class AdmissionPace:
    """Admits `per_s` microbatches a second, evenly; after an idle time, at most one early.

    All times in seconds by the caller's clock.
    """

    def __init__(self, per_s: float, now: float) -> None:
        self.per_s = per_s
        self._due = now

    def change(self, per_s: float, now: float) -> None:
        """Another rate, from now on: a higher one shortens the present pause."""
        if per_s > self.per_s:
            self._due = min(self._due, now + 1.0 / per_s)
        self.per_s = per_s

    def pause_s(self, now: float) -> float:
        """How long the next microbatch has to wait; 0: it may go."""
        return max(0.0, self._due - now)

    def admit(self, now: float) -> None:
        """Counts a microbatch that goes now."""
        period_s = 1.0 / self.per_s
        self._due = max(self._due, now - period_s) + period_s
