"""Robust figures of each instance's speed, of its present incarnation. Pure.

They come from samples of the router's own cluster and from other routers' Type 4 messages. A single absurd
figure must change nothing: figures are medians of the latest few, and a figure that is no number, negative or
implausibly large is refused and counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from schemas.limits import MOST_MS
from schemas.signals import ComputeEntry
from schemas.telemetry import InstanceSample

SAMPLES = 5
"""Samples per median: two absurd ones among them change nothing. At least one sample a second comes."""

MOST_QUEUE = 1_000_000


@dataclass(slots=True)
class Figures:
    """The figures of one incarnation, in milliseconds; 0 if not measured."""

    incarnation: str
    queue: int = 0
    microbatches: int = -1
    service_ms: float = 0.0
    """Per microbatch, forward plus backward."""
    latency_ms: float = 0.0
    """Per received transfer."""
    _service: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _latency: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def served(self, service_ms: float) -> None:
        self._service.append(service_ms)
        self.service_ms = median(self._service)  # computed once per sample, read often

    def transferred(self, latency_ms: float) -> None:
        self._latency.append(latency_ms)
        self.latency_ms = median(self._latency)


class LoadStatistics:
    """Figures by SID."""

    def __init__(self) -> None:
        self._figures: dict[str, Figures] = {}
        self.refused = 0

    def add(self, sample: InstanceSample) -> bool:
        """Take a sample; False if it is implausible."""
        latency_ms = mean_transfer_ms(sample)
        return self._add(
            sample.sid, sample.incarnation, sample.service_ms, latency_ms, sample.queue, sample.microbatches
        )

    def add_reported(self, entry: ComputeEntry) -> bool:
        """Take the figures that another cluster's router reports of an instance."""
        return self._add(entry.sid, entry.incarnation, entry.service_ms, entry.latency_ms, entry.queue, None)

    def _add(
        self,
        sid: str,
        incarnation: str,
        service_ms: float,
        latency_ms: float,
        queue: int,
        microbatches: int | None,
    ) -> bool:
        if not (is_plausible(service_ms) and is_plausible(latency_ms)) or not 0 <= queue <= MOST_QUEUE:
            self.refused += 1
            return False
        figures = self._figures.get(sid)
        if figures is None or figures.incarnation != incarnation:
            figures = self._figures[sid] = Figures(incarnation)
        figures.queue = queue
        if service_ms > 0 and microbatches != figures.microbatches:  # idle instances repeat their last figure
            figures.served(service_ms)
        if latency_ms > 0:
            figures.transferred(latency_ms)
        if microbatches is not None:
            figures.microbatches = microbatches
        return True

    def of(self, sid: str, incarnation: str) -> Figures | None:
        """The figures of this incarnation, or None."""
        figures = self._figures.get(sid)
        return figures if figures is not None and figures.incarnation == incarnation else None

    def forget(self, sid: str) -> None:
        self._figures.pop(sid, None)


def is_plausible(ms: float, most_ms: float = MOST_MS) -> bool:
    """Whether this can be a duration in milliseconds: a number, not negative, at most `most_ms`."""
    return math.isfinite(ms) and 0 <= ms <= most_ms


def mean_transfer_ms(sample: InstanceSample) -> float:
    """Milliseconds per transfer over all links since the last sample; 0 without transfers."""
    transfers = sum(link.transfers for link in sample.links)
    return sum(link.transfer_ms for link in sample.links) / transfers if transfers > 0 else 0.0


def usual(values: Iterable[float]) -> float:
    """The median of the values above 0; 0 if there is none."""
    positive = [value for value in values if value > 0]
    return median(positive) if positive else 0.0


def relative(service_ms: Mapping[str, float], alike: float) -> dict[str, float]:
    """Each service time as a multiple of the median; 1 if it is unknown or within `alike` of the median."""
    median_ms = usual(service_ms.values())
    ratios = {}
    for sid, ms in service_ms.items():
        part = ms / median_ms if ms > 0 and median_ms > 0 else 1.0
        ratios[sid] = 1.0 if abs(part - 1.0) <= alike else part
    return ratios
