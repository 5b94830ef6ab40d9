"""The links of a job as their senders measure them, and what goes over each. Pure: samples in, rows out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.registry import ServiceRecord
from schemas.telemetry import InstanceSample, LinkFigures

SAMPLES = 10
"""Samples of a sender over which is counted what went over each of its links."""
FRESH_S = 15.0
"""Figures are told every 5 seconds; older ones say nothing about now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLine:
    """One direction of a link. `share`: of the bytes that the sender sent to the receiver's stage lately;
    `beside_ms`: by how much a transfer takes longer than over the sender's best link to that stage."""

    job: str
    sender: str
    receiver: str
    stage: int
    latency_ms: float | None
    bandwidth_bytes_per_s: float | None
    loss: float
    transfer_ms: float | None
    bytes: int
    trend: str
    evidence: str
    share: float | None
    beside_ms: float | None


@dataclass
class _Link:
    sent: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    figures: LinkFigures | None = None
    at: float = 0.0


class Links:
    """What senders have said of their links."""

    def __init__(self) -> None:
        self._links: dict[str, dict[str, _Link]] = {}
        self._incarnations: dict[str, str] = {}

    def take(self, sample: InstanceSample, at: float) -> None:
        """One more sample of a sender."""
        if self._incarnations.get(sample.sid) != sample.incarnation:
            self._links.pop(sample.sid, None)
        self._incarnations[sample.sid] = sample.incarnation
        held = self._links.setdefault(sample.sid, {})
        for link in sample.links:
            known = held.setdefault(link.peer, _Link())
            known.sent.append(link.sent_bytes)
            if link.figures is not None:
                known.figures, known.at = link.figures, at

    def keep(self, sids: set[str]) -> None:
        """Forgets all others."""
        self._links = {
            sender: {receiver: link for receiver, link in links.items() if receiver in sids}
            for sender, links in self._links.items()
            if sender in sids
        }
        self._incarnations = {sid: told for sid, told in self._incarnations.items() if sid in sids}

    def told(self) -> set[str]:
        """Senders with figures of a link."""
        return {
            sender for sender, links in self._links.items() if any(link.figures for link in links.values())
        }

    def lines(self, records: Mapping[str, ServiceRecord], now: float, job: str | None) -> list[LinkLine]:
        """Links that were measured lately; by job, sender and receiver."""
        found = []
        for sender, links in sorted(self._links.items()):
            record = records.get(sender)
            if record is None or record.job is None or job not in (None, record.job):
                continue
            stages: dict[int, dict[str, _Link]] = defaultdict(dict)
            for receiver, link in sorted(links.items()):
                stage = records[receiver].stage if receiver in records else None
                if stage is not None:
                    stages[stage][receiver] = link
            for stage, held in sorted(stages.items()):
                found += _lines(record.job, sender, stage, held, now)
        return found


def _lines(job: str, sender: str, stage: int, links: Mapping[str, _Link], now: float) -> list[LinkLine]:
    sent = sum(sum(link.sent) for link in links.values())
    fresh = {
        receiver: link.figures
        for receiver, link in links.items()
        if link.figures is not None and now - link.at <= FRESH_S
    }
    best = min((told.transfer_ms for told in fresh.values() if told.transfer_ms is not None), default=None)
    return [
        LinkLine(
            job=job,
            sender=sender,
            receiver=receiver,
            stage=stage,
            latency_ms=told.latency_ms,
            bandwidth_bytes_per_s=told.bandwidth_bytes_per_s,
            loss=told.loss,
            transfer_ms=told.transfer_ms,
            bytes=told.bytes,
            trend=told.trend,
            evidence=told.evidence,
            share=sum(links[receiver].sent) / sent if sent else None,
            beside_ms=told.transfer_ms - best if told.transfer_ms is not None and best is not None else None,
        )
        for receiver, told in fresh.items()
    ]
