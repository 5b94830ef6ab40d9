"""Figures of the links of one cluster's instances, as those instances report them. Pure.

Each sender measures its own links (`workers.links.link_quality`). The router gathers them by receiver, for
the route tables of senders that have sent nothing there yet, and by sender, for its Type 5 reports.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import median

from entities.router.load_statistics import is_plausible
from schemas import names
from schemas.signals import LinkReport
from schemas.telemetry import InstanceSample, LinkFigures

REPORTED = 8
"""Links of a job in one Type 5 report: the slowest."""


@dataclass(frozen=True, slots=True)
class _ReportedLink:
    job: str
    stage: int
    figures: LinkFigures


class LinkStatistics:
    """The latest figures of each link, by receiver and sender. A sender has at most 64 links."""

    def __init__(self) -> None:
        self._to: dict[str, dict[str, _ReportedLink]] = {}
        self._from: dict[str, tuple[str, set[str]]] = {}  # SID → incarnation, receivers
        self.refused = 0

    def add(self, sample: InstanceSample) -> None:
        """Take a sender's figures of its links; implausible ones are refused and counted."""
        incarnation, receivers = self._from.get(sample.sid, (sample.incarnation, set()))
        if incarnation != sample.incarnation:
            self._forget_from(sample.sid)
            receivers = set()
        self._from[sample.sid] = (sample.incarnation, receivers)
        for link in sample.links:
            if link.figures is None:
                continue
            if names.job_of(link.peer) != sample.job or not _is_plausible(link.figures):
                self.refused += 1
                continue
            receivers.add(link.peer)
            report = _ReportedLink(sample.job, sample.stage, link.figures)
            self._to.setdefault(link.peer, {})[sample.sid] = report

    def forget(self, sid: str) -> None:
        """Drop the links from and to an instance that is gone."""
        self._forget_from(sid)
        for sender in self._to.pop(sid, {}):
            self._from[sender][1].discard(sid)

    def _forget_from(self, sid: str) -> None:
        _, receivers = self._from.pop(sid, ("", set()))
        for receiver in receivers:
            senders = self._to[receiver]
            senders.pop(sid, None)
            if not senders:
                del self._to[receiver]

    def knows(self, receiver: str) -> bool:
        """Whether any sender has reported a link to this receiver."""
        return receiver in self._to

    def transfer_ms(self, receiver: str, from_stage: int) -> float | None:
        """Median milliseconds of a transfer from this cluster's instances of a stage; None if unknown."""
        links = [
            link.figures.transfer_ms
            for link in self._to.get(receiver, {}).values()
            if link.stage == from_stage and link.figures.transfer_ms is not None
        ]
        return median(links) if links else None

    def worst(self, receiver: str, from_stage: int) -> tuple[str, LinkFigures] | None:
        """The sender and the figures of the slowest link to an instance."""
        links = [
            (sender, link.figures)
            for sender, link in self._to.get(receiver, {}).items()
            if link.stage == from_stage
        ]
        return max(links, key=lambda entry: entry[1].transfer_ms or 0.0, default=None)

    def report(self, job: str) -> tuple[LinkReport, ...]:
        """The slowest links of a job, slowest first."""
        links = (
            (link.figures.transfer_ms or 0.0, sender, receiver)
            for receiver, senders in self._to.items()
            for sender, link in senders.items()
            if link.job == job
        )
        return tuple(
            LinkReport(sender=sender, receiver=receiver, figures=self._to[receiver][sender].figures)
            for _, sender, receiver in heapq.nlargest(REPORTED, links)
        )


def in_words(figures: LinkFigures) -> str:
    """One link as text: `302.1 ms per transfer (latency 300.0 ms, 2.0 MB/s, 1.0% lost, slower)`."""
    parts = []
    if figures.latency_ms is not None:
        parts.append(f"latency {figures.latency_ms:.1f} ms")
    if figures.bandwidth_bytes_per_s is not None:
        parts.append(f"{figures.bandwidth_bytes_per_s / 1e6:.1f} MB/s")
    if figures.loss > 0:
        parts.append(f"{figures.loss:.1%} lost")
    if figures.trend and figures.trend != "steady":
        parts.append(figures.trend)
    return f"{figures.transfer_ms or 0.0:.1f} ms per transfer ({', '.join(parts)})"


def _is_plausible(figures: LinkFigures) -> bool:
    times = (figures.latency_ms, figures.transfer_ms)
    rate = figures.bandwidth_bytes_per_s
    return (
        all(ms is None or is_plausible(ms) for ms in times)
        and (rate is None or (math.isfinite(rate) and rate > 0))
        and 0 <= figures.loss <= 1
        and figures.bytes >= 0
    )
