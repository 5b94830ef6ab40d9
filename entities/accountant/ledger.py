"""Reports of nodes and claims of instances in, charges out. Pure.

A report counts from beginnings, so what it adds is the difference to what is counted already. So a report
that is lost, comes twice or is read again after a restart changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.accounts import (
    LONGEST_PASS_MS,
    REPORT_EARLY_S,
    REPORT_LATE_S,
    SLICE_S,
    CountedNode,
    CountedStep,
    CountedStretch,
    CountedWork,
    OfferedSlot,
    PayerKind,
    SlotReport,
    SlotStretch,
)
from schemas.computed_work import StepUnits, WorkNovelty
from schemas.step import MicrobatchClaim

KEPT_STEPS = 4
"""Of a job, newest first, whose units are known one by one: two may be open at a time."""


class RowKey(NamedTuple):
    """Whose row of a slice: payer, and where the devices are."""

    payer_kind: PayerKind
    payer: str
    cluster: str
    kind: str


IDLE = ("idle", "")


@dataclass(frozen=True, slots=True)
class Charge:
    """Amounts for one row of one slice."""

    start: int
    key: RowKey
    amounts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TakenReport:
    """How far the node is counted now, and what the report adds. `refused`: why it adds nothing."""

    node: CountedNode
    charges: tuple[Charge, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class TakenClaim:
    """How far the job is counted now, and what the claim adds."""

    work: CountedWork
    charges: tuple[Charge, ...] = ()


def take_report(node: CountedNode, report: SlotReport, now: float) -> TakenReport:
    """Counts a node's report.

    Args:
        node: how far its reports are counted.
        report: the report.
        now: the accountant's clock, seconds since the epoch.
    """
    if not now - REPORT_LATE_S <= report.at <= now + REPORT_EARLY_S:
        return TakenReport(node, refused=f"it is of another time: {report.at - now:+.0f} s by this clock")
    if report.incarnation == node.incarnation and report.number <= node.number:
        return TakenReport(node)  # an older one, or the same again
    same = report.incarnation == node.incarnation
    floor = node.floor if same else max(node.at, report.at - REPORT_LATE_S)
    offers, stretches = (node.offers, node.stretches) if same else ({}, {})
    charges: list[Charge] = []
    counted_offers: dict[str, CountedStretch] = {}
    kinds: dict[int, OfferedSlot] = {}
    for offer in report.slots:
        kinds[offer.slot] = offer
        key = f"{offer.slot}/{offer.since!r}"
        counted_offers[key] = _offered(offers.get(key), offer, report, floor, charges)
    counted: dict[str, CountedStretch] = {}
    for stretch in report.stretches:
        key = f"{stretch.slot}/{stretch.began!r}"
        slot = kinds.get(stretch.slot)
        counted[key] = _held(stretches.get(key), stretch, slot, report, floor, charges)
    present = CountedNode(
        incarnation=report.incarnation,
        number=report.number,
        cluster=report.cluster,
        at=report.at,
        floor=floor,
        offers=counted_offers,
        stretches=counted,
    )
    return TakenReport(present, tuple(charges))


def _offered(
    known: CountedStretch | None,
    offer: OfferedSlot,
    report: SlotReport,
    floor: float,
    charges: list[Charge],
) -> CountedStretch:
    begin = max(offer.since, floor, 0.0 if known is None else known.until)
    until = min(offer.until, report.at)
    row = RowKey("idle", "", report.cluster, offer.kind)
    charges += (Charge(start, row, {"offered_s": part_s}) for start, part_s in parts_of(begin, until))
    return CountedStretch(until=max(begin, until), kind=offer.kind)


def _held(
    known: CountedStretch | None,
    stretch: SlotStretch,
    slot: OfferedSlot | None,
    report: SlotReport,
    floor: float,
    charges: list[Charge],
) -> CountedStretch:
    begin = max(stretch.began, floor, 0.0 if known is None else known.until)
    until = min(stretch.until, report.at)
    energy_j = stretch.energy_j or 0.0
    more_j = max(0.0, energy_j - (0.0 if known is None else known.energy_j))
    more_bytes = max(0, stretch.sent_bytes - (0 if known is None else known.sent_bytes))
    before = CountedStretch(until=0.0) if known is None else known
    worked = {
        name: more
        for name in ("busy_s", "recomputed_s")
        if (more := max(0.0, getattr(stretch, name) - getattr(before, name)))
    }
    kind = slot.kind if slot is not None else "" if known is None else known.kind
    row = RowKey(stretch.payer_kind, stretch.payer or "", report.cluster, kind)
    whole_s = until - begin
    for start, part_s in parts_of(begin, until):
        amounts = {"held_s": part_s, "sent_bytes": more_bytes * part_s / whole_s}
        amounts |= {name: more * part_s / whole_s for name, more in worked.items()}
        if stretch.energy_j is not None:
            amounts |= {"energy_j": more_j * part_s / whole_s, "metered_s": part_s}
        if slot is not None and slot.price is not None:
            amounts |= {"label_price_s": slot.price * part_s, "labelled_s": part_s}
        if slot is not None and slot.carbon is not None:
            amounts |= {"label_carbon_s": slot.carbon * part_s, "carbon_s": part_s}
        charges.append(Charge(start, row, amounts))
    grew = whole_s > 0
    return CountedStretch(
        until=max(begin, until),
        energy_j=energy_j if grew or known is None else known.energy_j,
        sent_bytes=stretch.sent_bytes if grew or known is None else known.sent_bytes,
        busy_s=stretch.busy_s if grew or known is None else known.busy_s,
        recomputed_s=stretch.recomputed_s if grew or known is None else known.recomputed_s,
        incarnation=stretch.incarnation or "",
        kind=kind,
    )


def parts_of(begin: float, until: float) -> Iterator[tuple[int, float]]:
    """The slices between two times, each by its beginning with the seconds in it."""
    start = int(begin // SLICE_S) * SLICE_S
    while start < until:
        part_s = min(until, start + SLICE_S) - max(begin, start)
        if part_s > 0:
            yield start, part_s
        start += SLICE_S


# --- claims ------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class JobClaims:
    """A job's claims so far, in a form that takes many quickly; `counted()` is the same to be written."""

    oldest: int = 0
    steps: dict[int, StepUnits] = field(default_factory=dict)
    scored: dict[int, StepUnits] = field(default_factory=dict)

    @classmethod
    def of(cls, work: CountedWork | None) -> JobClaims:
        """What was counted before."""
        if work is None:
            return cls()
        return cls(work.oldest, _units(work.steps), _units(work.scored))

    def counted(self) -> CountedWork:
        """How far the job is counted."""
        return CountedWork(oldest=self.oldest, steps=_told(self.steps), scored=_told(self.scored))

    def take(self, claim: MicrobatchClaim, at: float, place: tuple[str, str], now: float) -> Charge | None:
        """Counts a claim; None: it adds nothing.

        Args:
            claim: the claim.
            at: when it was sent.
            place: cluster and kind of device of its owner; empty where unknown.
            now: the accountant's clock.
        """
        spent_ms = claim.forward_ms + claim.backward_ms
        if not 0 <= spent_ms <= LONGEST_PASS_MS or not math.isfinite(spent_ms):
            return None
        novelty = self._novelty(claim)
        if novelty is WorkNovelty.REPEATED:
            return None
        if not now - REPORT_LATE_S <= at <= now + REPORT_EARLY_S:
            at = now
        start = int(at // SLICE_S) * SLICE_S
        amounts: dict[str, float] = {}
        if novelty is WorkNovelty.NEW:
            amounts["busy_s"] = spent_ms / 1e3
        else:
            amounts["recomputed_s"] = spent_ms / 1e3
        if not claim.evaluate:
            amounts["units"] = 1
            amounts["recomputed_units"] = int(novelty is WorkNovelty.RECOMPUTED)
        return Charge(start, RowKey("job", claim.job, *place), amounts)

    def _novelty(self, claim: MicrobatchClaim) -> WorkNovelty:
        steps = self.scored if claim.evaluate else self.steps
        units = steps.get(claim.step)
        if units is None:
            again = not claim.evaluate and claim.step < self.oldest
            units = steps[claim.step] = StepUnits(again=again)
            while len(steps) > KEPT_STEPS:
                self._drop_one(steps, claim)
        return units.take(claim)

    def _drop_one(self, steps: dict[int, StepUnits], claim: MicrobatchClaim) -> None:
        """Forgets the units of one step: of one done anew first, since the next one tells that it is over."""
        lowest = min(step for step in steps if step != claim.step)
        if not claim.evaluate:
            self.oldest = max(self.oldest, lowest + 1)
        del steps[lowest]


def _units(steps: tuple[CountedStep, ...]) -> dict[int, StepUnits]:
    return {
        each.step: StepUnits(
            {(stage, number): list(marks) for stage, number, marks in each.units}, again=each.again
        )
        for each in steps
    }


def _told(steps: Mapping[int, StepUnits]) -> tuple[CountedStep, ...]:
    return tuple(
        CountedStep(
            step=step,
            again=each.again,
            units=tuple((stage, number, tuple(marks)) for (stage, number), marks in each.units.items()),
        )
        for step, each in steps.items()
    )
