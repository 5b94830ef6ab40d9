"""An instance's measurements of its own speed, for telemetry and for senders that choose among instances."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 5
"""Microbatches in each figure's median: two pauses of the machine change nothing, while a slower instance
shows after three microbatches."""

KEEP = 0.6
"""Share of the moving average that stays with each microbatch."""

RECOVERED = 0.2
"""A microbatch that takes less than this share of the average restarts the average. No accident makes an
instance faster than it is, and a slow one gets too few microbatches to show its recovery otherwise."""


@dataclass(slots=True)
class Average:
    """A moving average of medians."""

    value: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, value: float) -> None:
        recent = self._recent
        if value < RECOVERED * self.value:
            recent.clear()
        recent.append(value)
        ordered = sorted(recent)  # faster than `statistics.median`, which checks its input
        count = len(ordered)
        middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
        self.value = middle if count < RECENT else KEEP * self.value + (1 - KEEP) * middle


@dataclass(slots=True)
class ComputeLoad:
    """Moving figures; milliseconds per microbatch."""

    reduce_ms: float = 0.0
    microbatches: int = 0
    tokens: int = 0
    _forward: Average = field(default_factory=Average)
    _backward: Average = field(default_factory=Average)

    @property
    def forward_ms(self) -> float:
        return self._forward.value

    @property
    def backward_ms(self) -> float:
        return self._backward.value

    @property
    def service_ms(self) -> float:
        """Forward plus backward."""
        return self._forward.value + self._backward.value

    def measured(self, forward_ms: float, backward_ms: float) -> None:
        """Adds the times of one more microbatch."""
        self._forward.add(forward_ms)
        self._backward.add(backward_ms)
        self.microbatches += 1
