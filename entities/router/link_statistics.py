"""What a router knows of the links of its cluster's instances, by what those tell of them. Pure.

Each sender measures its own links (`workers.links.link_quality`). The router gathers them by receiver: that
is what its route tables tell senders which have sent nothing there yet, and by sender: that is what Type 5
reports.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import median

from schemas import names
from schemas.signals import LinkReport
from schemas.telemetry import InstanceSample, LinkFigures

MOST_MS = 1e7

REPORTED = 8
"""Links of a job in one Type 5: the slowest."""


@dataclass(frozen=True, slots=True)
class _ReportedLink:
    job: str
    stage: int
    figures: LinkFigures


class LinkStatistics:
    """The latest figures of each link, by receiver and sender. A sender has 64 links at most."""

    def __init__(self) -> None:
        self._to: dict[str, dict[str, _ReportedLink]] = {}
        self._from: dict[str, tuple[str, set[str]]] = {}  # SID → incarnation, receivers
        self.refused = 0

    def add(self, sample: InstanceSample) -> None:
        """Takes in what a sender says of its links; what can't be believed is refused."""
        incarnation, receivers = self._from.get(sample.sid, (sample.incarnation, set()))
        if incarnation != sample.incarnation:
            self._forget_from(sample.sid)
            receivers = set()
        self._from[sample.sid] = (sample.incarnation, receivers)
        for link in sample.links:
            if link.figures is None:
                continue
            if names.job_of(link.peer) != sample.job or not _sound(link.figures):
                self.refused += 1
                continue
            receivers.add(link.peer)
            told = _ReportedLink(sample.job, sample.stage, link.figures)
            self._to.setdefault(link.peer, {})[sample.sid] = told

    def forget(self, sid: str) -> None:
        """An instance is gone: what was told by it, and of links to it."""
        self._forget_from(sid)
        for sender in self._to.pop(sid, {}):
            self._from[sender][1].discard(sid)

    def _forget_from(self, sid: str) -> None:
        _, receivers = self._from.pop(sid, ("", set()))
        for receiver in receivers:
            told = self._to[receiver]
            told.pop(sid, None)
            if not told:
                del self._to[receiver]

    def knows(self, receiver: str) -> bool:
        """Whether anybody has told of a link to it."""
        return receiver in self._to

    def transfer_ms(self, receiver: str, from_stage: int) -> float | None:
        """Of a microbatch, from this cluster's instances of a stage; None: none of them has told."""
        known = [
            told.figures.transfer_ms
            for told in self._to.get(receiver, {}).values()
            if told.stage == from_stage and told.figures.transfer_ms is not None
        ]
        return median(known) if known else None

    def worst(self, receiver: str, from_stage: int) -> tuple[str, LinkFigures] | None:
        """The slowest link to an instance, and its sender."""
        known = [
            (sender, told.figures)
            for sender, told in self._to.get(receiver, {}).items()
            if told.stage == from_stage
        ]
        return max(known, key=lambda one: one[1].transfer_ms or 0.0, default=None)

    def report(self, job: str) -> tuple[LinkReport, ...]:
        """The slowest links of a job, slowest first."""
        known = (
            (told.figures.transfer_ms or 0.0, sender, receiver)
            for receiver, senders in self._to.items()
            for sender, told in senders.items()
            if told.job == job
        )
        return tuple(
            LinkReport(sender=sender, receiver=receiver, figures=self._to[receiver][sender].figures)
            for _, sender, receiver in heapq.nlargest(REPORTED, known)
        )


def in_words(figures: LinkFigures) -> str:
    """One link, for a reason: `302.1 ms for 64 KiB (300.0 ms, 2.0 MB/s, 1 % lost, slower)`."""
    told = []
    if figures.latency_ms is not None:
        told.append(f"latency {figures.latency_ms:.1f} ms")
    if figures.bandwidth_bytes_per_s is not None:
        told.append(f"{figures.bandwidth_bytes_per_s / 1e6:.1f} MB/s")
    if figures.loss > 0:
        told.append(f"{figures.loss:.1%} lost")
    if figures.trend and figures.trend != "steady":
        told.append(figures.trend)
    return f"{figures.transfer_ms or 0.0:.1f} ms per transfer ({', '.join(told)})"


def _sound(figures: LinkFigures) -> bool:
    times = (figures.latency_ms, figures.transfer_ms)
    rate = figures.bandwidth_bytes_per_s
    return (
        all(ms is None or (math.isfinite(ms) and 0 <= ms <= MOST_MS) for ms in times)
        and (rate is None or (math.isfinite(rate) and rate > 0))
        and 0 <= figures.loss <= 1
        and figures.bytes >= 0
    )
