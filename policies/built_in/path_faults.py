"""Distinguishes broken links from broken instances by link figures: errors, loss, shifted transfer times.

A single link at fault is itself broken. If most links of one instance are at fault, by the reports of both
ends, the instance is broken (the vote of B. Arzani et al., 007: Democratically finding the cause of packet
drops, NSDI 2018). The core is `locate`. Where transfers break or are lost, such an instance is avoided; where
they only take long, it is avoided if its stage is faster without it (`avoidance`), and noted otherwise.

For fabrics whose monitoring posts port counters, `policies.contrib.port_faults` goes further; in the mesh,
routing itself moves traffic among links, so that rates are no evidence here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import ClassVar

from bus.subject_row import Subject
from bus.subjects import COMPUTE
from policies.built_in.avoidance import avoiding_pays
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.link_history import Link
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicySuggestion
from schemas.telemetry import InstanceSample, LinkFigures

USUAL, RECENT = 12, 2
"""Number of figures whose median is the usual transfer time, and of those that are compared with it."""
LOSSY = 0.1
BROKEN = 2
"""Errors within the last `RECENT` samples."""
SLOWER_TIMES, SLOWER_DEVIATIONS = 2.0, 6.0
"""A transfer must take longer than usual by both limits, and by more than what busy cores alone cost."""
MOST_OF = 2 / 3
"""Share of an instance's links at fault from which the instance counts as at fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkDiagnosis:
    """The fault of one link, in words. `slow_ms`: what a transfer takes, if that is all; else None."""

    link: Link
    what: str
    slow_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Instances at fault, each with its links' faults and its number of links; and single links at fault."""

    instances: Mapping[str, tuple[Sequence[LinkDiagnosis], int]]
    links: Sequence[LinkDiagnosis]


def link_fault(
    link: Link,
    transfer_ms: Sequence[float],
    errors: Sequence[int],
    loss: float,
    slower_ms: float = 10.0,
) -> LinkDiagnosis | None:
    """The fault of a link; None if it has none.

    Args:
        link: The link.
        transfer_ms: Its last figures, oldest first.
        errors: The error counts of its last samples.
        loss: Share of transfers that had to be repeated.
        slower_ms: How much longer than usual a transfer must take: busy cores alone cost some milliseconds.
    """
    if sum(errors[-RECENT:]) >= BROKEN:
        return LinkDiagnosis(link=link, what=f"{sum(errors[-RECENT:])} errors in {RECENT} samples")
    if loss >= LOSSY:
        return LinkDiagnosis(link=link, what=f"{loss:.0%} of transfers made again")
    if len(transfer_ms) < USUAL + RECENT:
        return None
    usual = transfer_ms[-USUAL - RECENT : -RECENT]
    if min(transfer_ms[-RECENT:]) <= min(usual) + slower_ms:
        return None  # nearly always: saves the computation below
    middle = median(usual)
    deviation = 1.4826 * median(abs(value - middle) for value in usual)
    now = min(transfer_ms[-RECENT:])
    limit = max(SLOWER_TIMES * middle, middle + SLOWER_DEVIATIONS * deviation, middle + slower_ms)
    if now <= limit:
        return None
    return LinkDiagnosis(link=link, what=f"{now:.1f} ms, usually {middle:.1f} ms", slow_ms=now)


def locate(links: Sequence[Link], faults: Sequence[LinkDiagnosis]) -> Located:
    """Assigns faults to instances or links. An instance needs at least two links, to differ from its link."""
    count: dict[str, int] = defaultdict(int)
    bad: dict[str, list[LinkDiagnosis]] = defaultdict(list)
    for link in links:
        for end in link:
            count[end] += 1
    for fault in faults:
        for end in fault.link:
            bad[end].append(fault)
    suspects = {sid: own for sid, own in bad.items() if len(own) >= 2 and len(own) >= MOST_OF * count[sid]}
    # Of two ends that explain the same faults, the one that explains more comes first.
    instances: dict[str, tuple[Sequence[LinkDiagnosis], int]] = {}
    explained: set[Link] = set()
    for sid, own in sorted(suspects.items(), key=lambda item: (-len(item[1]), item[0])):
        if sum(fault.link not in explained for fault in own) >= 2:
            instances[sid] = (own, count[sid])
            explained.update(fault.link for fault in own)
    return Located(instances=instances, links=[fault for fault in faults if fault.link not in explained])


class PathFaults(Policy):
    """Avoids an instance most of whose links are at fault, if its stage is better off; notes single links."""

    name: ClassVar[str] = "path-faults"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 2.0
    valid_s: ClassVar[float] = 30.0

    def __init__(self) -> None:
        self._times: dict[str, dict[Link, deque[float]]] = {}
        self._errors: dict[str, dict[Link, deque[int]]] = {}
        self._loss: dict[str, dict[Link, float]] = {}
        self._incarnations: dict[str, dict[str, str]] = {}

    def subscribes(self) -> tuple[Subject, ...]:
        return (*super().subscribes(), COMPUTE)

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            for by_job in (self._times, self._errors, self._loss, self._incarnations):
                by_job.pop(event.job, None)

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        times = self._times.setdefault(sample.job, {})
        errors = self._errors.setdefault(sample.job, {})
        loss = self._loss.setdefault(sample.job, {})
        incarnations = self._incarnations.setdefault(sample.job, {})
        if incarnations.get(sample.sid, sample.incarnation) != sample.incarnation:
            for old in [link for link in errors if sample.sid in link]:  # a new process has new links
                errors.pop(old)
                times.pop(old)
                loss.pop(old, None)
        incarnations[sample.sid] = sample.incarnation
        for link in sample.links:
            key = (sample.sid, link.peer)
            if key not in errors:
                errors[key], times[key] = deque(maxlen=RECENT), deque(maxlen=USUAL + RECENT)
            errors[key].append(link.errors)
            figures: LinkFigures | None = link.figures
            if figures is None:
                continue
            loss[key] = figures.loss
            if figures.transfer_ms is not None and isfinite(figures.transfer_ms):
                times[key].append(figures.transfer_ms)

    def decide(self, view: JobView, now: float) -> Suggestions:
        errors = self._errors.get(view.job, {})
        alive = [
            link
            for link in sorted(errors)
            if all(sid in view.instances and view.instances[sid].usable for sid in link)
        ]
        times, loss = self._times.get(view.job, {}), self._loss.get(view.job, {})
        link_faults = [
            fault
            for link in alive
            if (fault := link_fault(link, list(times[link]), list(errors[link]), loss.get(link, 0.0)))
        ]
        located = locate(alive, link_faults)
        suggestions: list[PolicySuggestion] = []
        noted = list(located.links)
        for sid, (faults, count) in located.instances.items():
            stage = view.instances[sid].stage
            others = {instance.sid for instance in view.stage(stage, now)} - located.instances.keys()
            slow_ms = [fault.slow_ms for fault in faults if fault.slow_ms is not None]
            if len(slow_ms) == len(faults) and not avoiding_pays(
                view, stage, sid, median(slow_ms), now, located.instances
            ):
                noted += faults
                continue
            if others and view.is_due(f"instance {sid}", now, self.valid_s / 2):
                suggestions.append(
                    self.avoid(
                        view,
                        sid,
                        reason=f"{len(faults)} of {count} links of {sid} at fault: {_describe(faults)}",
                        confidence=round(min(0.95, 0.5 + 0.45 * len(faults) / count), 3),
                        valid_s=self.valid_s,
                    )
                )
        if noted and view.is_due("note", now, self.valid_s / 2):
            text = f"links at fault: {_describe(noted)}"
            suggestions.append(self.note(view, text, confidence=0.8))
        return suggestions or None


def _describe(faults: Sequence[LinkDiagnosis]) -> str:
    return "; ".join(f"{fault.link[0]} → {fault.link[1]}: {fault.what}" for fault in faults[:4])
