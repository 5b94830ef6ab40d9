"""Who held which slot of a node, from when to when; what its device used and its instance sent. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from entities.cluster.core import LocalIncarnation
from schemas.accounts import CARBON_LABEL, PRICE_LABEL, TOLD_AGAIN_S, OfferedSlot, SlotStretch
from schemas.cluster import Slot
from schemas.telemetry import InstanceSample

MOST_ENDED = 4096


@dataclass(slots=True)
class _Stretch:
    began: float
    holder: LocalIncarnation | None
    device: str
    until: float | None = None
    last_j: float | None = None
    energy_j: float | None = None
    sent_bytes: int = 0
    busy_s: float = 0.0
    recomputed_s: float = 0.0


@dataclass(slots=True)
class _Offer:
    slot: Slot
    since: float
    until: float | None = None


@dataclass(slots=True)
class SlotMeter:
    """Follows the slots of one node. Times are seconds since the epoch, and never go back."""

    _open: dict[int, _Stretch] = field(default_factory=dict)
    _offers: dict[int, _Offer] = field(default_factory=dict)
    _ended: deque[tuple[int, _Stretch]] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    _withdrawn: deque[_Offer] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))

    def look(self, slots: Iterable[Slot], holders: Iterable[LocalIncarnation], now: float) -> bool:
        """Takes in who holds the slots now; returns whether anything has changed."""
        by_slot = {each.slot: each for each in holders if each.slot is not None}
        present = {slot.index: slot for slot in slots}
        changed = False
        for index in list(self._offers):
            if index not in present or _differs(self._offers[index].slot, present[index]):
                self._withdraw(index, now)
                changed = True
        for index, slot in present.items():
            if index not in self._offers:
                self._offers[index] = _Offer(slot, now)
            holder, running = by_slot.get(index), self._open.get(index)
            if running is not None and _same(running.holder, holder):
                continue
            changed = True
            self._end(index, now)
            self._open[index] = _Stretch(now, holder, slot.device)
        return changed

    def _withdraw(self, index: int, now: float) -> None:
        offer = self._offers.pop(index)
        offer.until = now
        self._withdrawn.append(offer)
        self._end(index, now)

    def _end(self, index: int, now: float) -> None:
        stretch = self._open.pop(index, None)
        if stretch is not None and now > stretch.began:
            stretch.until = now
            self._ended.append((index, stretch))

    def take(self, sample: InstanceSample) -> None:
        """What an instance sent over links, what its device has used, in equal parts of those on it, and how
        long one that serves has computed.
        """
        stretch = next(
            (
                each
                for each in self._open.values()
                if each.holder is not None
                and (each.holder.sid, each.holder.incarnation) == (sample.sid, sample.incarnation)
            ),
            None,
        )
        if stretch is None:
            return
        stretch.sent_bytes += sum(max(0, link.sent_bytes) for link in sample.links)
        if sample.serving is not None:
            stretch.busy_s = max(stretch.busy_s, sample.serving.busy_s)
            stretch.recomputed_s = max(stretch.recomputed_s, sample.serving.recomputed_s)
        meter_j = None if sample.device is None else sample.device.energy_j
        if meter_j is None or not math.isfinite(meter_j):
            return
        sharing = sum(each.device == stretch.device for each in self._open.values())
        # The first reading only begins the measurement, as does a lower one: its driver was loaded anew.
        used_j = 0.0 if stretch.last_j is None else max(0.0, meter_j - stretch.last_j) / max(1, sharing)
        stretch.energy_j = (stretch.energy_j or 0.0) + used_j
        stretch.last_j = meter_j

    def offers(self, now: float) -> tuple[OfferedSlot, ...]:
        """The slots that are offered now, and those that were until a short time ago."""
        while self._withdrawn and (self._withdrawn[0].until or now) < now - TOLD_AGAIN_S:
            self._withdrawn.popleft()
        return tuple(_offered(each, now) for each in (*self._withdrawn, *self._offers.values()))

    def stretches(self, now: float) -> tuple[SlotStretch, ...]:
        """Those that last, up to now, and those that ended a short time ago."""
        while self._ended and (self._ended[0][1].until or now) < now - TOLD_AGAIN_S:
            self._ended.popleft()
        return tuple(_told(index, each, now) for index, each in (*self._ended, *self._open.items()))


def _same(one: LocalIncarnation | None, other: LocalIncarnation | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.sid, one.incarnation) == (other.sid, other.incarnation)


def _differs(one: Slot, other: Slot) -> bool:
    return (one.device, one.device_kind, one.labels) != (other.device, other.device_kind, other.labels)


def _offered(offer: _Offer, now: float) -> OfferedSlot:
    slot = offer.slot
    return OfferedSlot(
        slot=slot.index,
        kind=slot.device_kind,
        since=offer.since,
        until=now if offer.until is None else offer.until,
        price=_number(slot, PRICE_LABEL),
        carbon=_number(slot, CARBON_LABEL),
    )


def _number(slot: Slot, label: str) -> float | None:
    try:
        value = float(slot.labels.get(label, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _told(index: int, stretch: _Stretch, now: float) -> SlotStretch:
    holder = stretch.holder
    return SlotStretch(
        slot=index,
        began=stretch.began,
        until=now if stretch.until is None else stretch.until,
        payer_kind="idle" if holder is None else "job",
        payer=None if holder is None else holder.job,
        incarnation=None if holder is None else holder.incarnation,
        energy_j=stretch.energy_j,
        sent_bytes=stretch.sent_bytes,
        busy_s=stretch.busy_s,
        recomputed_s=stretch.recomputed_s,
    )
