"""Slots that are kept for a tenant or a job, from one time until another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from entities.queue.queued_job import JobRequest
from entities.queue.slot_pools import ANY_SLOT, SlotNeeds, SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotReservation:
    """`count` slots that satisfy `needs`, for a tenant or a job, or for nobody (maintenance)."""

    name: str
    start_at: float
    end_at: float
    count: int
    needs: SlotNeeds = ANY_SLOT
    tenant: str = ""
    job: str = ""

    def __post_init__(self) -> None:
        if self.end_at <= self.start_at:
            raise ValueError(f"reservation {self.name}: it ends at {self.end_at:.0f}, before it starts")
        if self.count < 1:
            raise ValueError(f"reservation {self.name}: {self.count} slots: give at least 1")

    def is_for(self, request: JobRequest) -> bool:
        """Whether this job may use its slots. Lanes are never kept: what runs in them yields by itself."""
        if request.needs.lane:
            return False
        if self.job:
            return request.job == self.job
        return bool(self.tenant) and request.tenant == self.tenant

    def overlaps(self, other: SlotReservation) -> bool:
        """Whether both hold at some time."""
        return self.start_at < other.end_at and other.start_at < self.end_at


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedSlots:
    """A reservation with the numbers of its slots."""

    reservation: SlotReservation
    numbers: frozenset[int]


def too_many(new: SlotReservation, others: Iterable[SlotReservation], table: SlotTable) -> str:
    """Why a reservation can't be had beside the others, in one line with the remedy; empty: it can."""
    total = table.total(new.needs)
    if new.count > total:
        which = f" {new.needs}" if new.needs != ANY_SLOT else ""
        return f"reservation {new.name}: {new.count} slots{which}, the mesh has {total}: reserve fewer"
    rivals = [other for other in others if other.name != new.name and new.overlaps(other)]
    assigned = assign([*rivals, new], table)
    missing = next((new.count - len(each.numbers) for each in assigned if each.reservation is new), 0)
    if not missing:
        return ""
    names = ", ".join(sorted(other.name for other in rivals))
    return (
        f"reservation {new.name}: {missing} of its {new.count} slots are kept for {names} at the same time: "
        "reserve fewer, or another time"
    )


def counting(reservations: Iterable[SlotReservation], now: float) -> tuple[SlotReservation, ...]:
    """Those on which the slots of present ones depend: all that have not ended, and what overlapped these.

    Without the ended ones the others would have other slots all of a sudden, and jobs would leave them for
    that.
    """
    there = list(reservations)
    found = [each for each in there if each.end_at > now]
    ended = sorted((each for each in there if each.end_at <= now), key=lambda each: -each.end_at)
    for each in found:  # grows meanwhile: they in turn had slots beside others
        overlapping = [other for other in ended if other.overlaps(each)]
        found += overlapping
        ended = [other for other in ended if other not in overlapping]
    return tuple(found)


def assign(reservations: Sequence[SlotReservation], table: SlotTable) -> list[ReservedSlots]:
    """Which slots each reservation has: the last of those that satisfy it and that none before it has.

    The last, because jobs are given the first. The same mesh gives the same slots, so that nobody has to
    remember them.
    """
    assigned: list[ReservedSlots] = []
    for reservation in sorted(reservations, key=lambda each: (each.start_at, each.name)):
        taken: set[int] = set()
        for earlier in assigned:
            if earlier.reservation.overlaps(reservation):
                taken |= earlier.numbers
        usable = (number for pool in table.usable(reservation.needs) for number in table.pools[pool])
        left = [number for number in usable if number not in taken]
        assigned.append(ReservedSlots(reservation=reservation, numbers=frozenset(left[-reservation.count :])))
    return assigned


def barred_for(
    request: JobRequest, reserved: Iterable[ReservedSlots], now: float, until: float
) -> frozenset[int]:
    """The slots that a job may not use from `now` until `until`, because they are kept for others."""
    barred: frozenset[int] = frozenset()
    for each in reserved:
        window = each.reservation
        if window.start_at < until and now < window.end_at and not window.is_for(request):
            barred |= each.numbers
    return barred
