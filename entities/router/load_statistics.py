"""What a router knows of each instance's speed: robust figures of its present incarnation. Pure.

From samples of its own cluster's instances, and from what other routers tell of theirs (Type 4). One absurd
figure must move nothing: medians of the latest few, and what is not a number, negative or beyond reason is
refused and counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from schemas.signals import ComputeEntry
from schemas.telemetry import InstanceSample

KEPT = 5
"""Samples that a figure is the median of: two absurd ones change nothing. At least one a second comes."""

MOST_MS = 1e7
MOST_QUEUE = 1_000_000


@dataclass(slots=True)
class Figures:
    """One incarnation. Milliseconds; 0 where not measured."""

    incarnation: str
    queue: int = 0
    microbatches: int = -1
    service_ms: float = 0.0
    """Per microbatch, forward plus backward."""
    latency_ms: float = 0.0
    """Per transfer that it receives."""
    _service: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _latency: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def served(self, service_ms: float) -> None:
        self._service.append(service_ms)
        self.service_ms = median(self._service)  # once per sample, and read again and again

    def transferred(self, latency_ms: float) -> None:
        self._latency.append(latency_ms)
        self.latency_ms = median(self._latency)


class LoadStatistics:
    """Figures by SID."""

    def __init__(self) -> None:
        self._figures: dict[str, Figures] = {}
        self.refused = 0

    def add(self, sample: InstanceSample) -> bool:
        """Takes a sample in; False where it can't be believed."""
        latency_ms = mean_transfer_ms(sample)
        return self._add(
            sample.sid, sample.incarnation, sample.service_ms, latency_ms, sample.queue, sample.microbatches
        )

    def add_told(self, entry: ComputeEntry) -> bool:
        """Takes in what another cluster's router says of an instance."""
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
        sound = all(math.isfinite(ms) and 0 <= ms <= MOST_MS for ms in (service_ms, latency_ms))
        if not sound or not 0 <= queue <= MOST_QUEUE:
            self.refused += 1
            return False
        held = self._figures.get(sid)
        if held is None or held.incarnation != incarnation:
            held = self._figures[sid] = Figures(incarnation)
        held.queue = queue
        if service_ms > 0 and microbatches != held.microbatches:  # idle ones repeat what they said
            held.served(service_ms)
        if latency_ms > 0:
            held.transferred(latency_ms)
        if microbatches is not None:
            held.microbatches = microbatches
        return True

    def of(self, sid: str, incarnation: str) -> Figures | None:
        """None: nothing is known of this incarnation."""
        held = self._figures.get(sid)
        return held if held is not None and held.incarnation == incarnation else None

    def forget(self, sid: str) -> None:
        self._figures.pop(sid, None)


def mean_transfer_ms(sample: InstanceSample) -> float:
    """Milliseconds per transfer over all links since the last sample; 0 without transfers."""
    transfers = sum(link.transfers for link in sample.links)
    return sum(link.transfer_ms for link in sample.links) / transfers if transfers > 0 else 0.0


def usual(values: Iterable[float]) -> float:
    """The median of those above 0; 0 if there is none."""
    known = [value for value in values if value > 0]
    return median(known) if known else 0.0


def relative(service_ms: Mapping[str, float], alike: float) -> dict[str, float]:
    """Each service time as a multiple of the median; 1 for those within `alike` of it, and unknown ones."""
    middle = usual(service_ms.values())
    found = {}
    for sid, ms in service_ms.items():
        part = ms / middle if ms > 0 and middle > 0 else 1.0
        found[sid] = 1.0 if abs(part - 1.0) <= alike else part
    return found
