"""Reservations of slots: people make and cancel them, and the bucket `reservations` keeps them (ADR-0081)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.queue.reservations import SlotReservation, counting, too_many
from entities.queue.slot_pools import SlotNeeds, SlotTable
from schemas.envelope import Envelope
from schemas.errors import Conflict, NotFound
from schemas.queue import (
    CancelReservation,
    Reservations,
    ReservationSpec,
    ReservationsQuery,
    ReserveSlots,
    SlotsReserved,
)

log = get_logger("orchestrator")

MOST_RESERVATIONS = 200
"""That have not ended: each decision of the queue looks at all of them."""


class ReservationBook:
    """All reservations that have not ended.

    Args:
        table: the slots of the mesh.
        jobs: ids of the jobs that have not ended.
        changed: called after each change.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        table: Callable[[], SlotTable],
        jobs: Container[str],
        changed: Callable[[], None],
    ) -> None:
        self._bucket = bus.bucket(subjects.RESERVATION)
        self._table = table
        self._jobs = jobs
        self._changed = changed
        self._records: dict[str, SlotsReserved] = {}
        self._turn = asyncio.Lock()
        """Held by each change, so that no other one comes between its reading and its writing."""

    async def load(self) -> None:
        """Reads what earlier leaders have promised."""
        entries = await self._bucket.entries(strict=True)
        found = [entry.message for entry in entries if isinstance(entry.message, SlotsReserved)]
        self._records = {record.spec.name: record for record in found}

    def present(self, now: float) -> tuple[SlotsReserved, ...]:
        """Those that have not ended, by their start."""
        there = [record for record in self._records.values() if record.spec.end_at > now]
        return tuple(sorted(there, key=lambda record: (record.spec.start_at, record.spec.name)))

    def kept(self, now: float) -> tuple[SlotReservation, ...]:
        """For the queue's core: with them those on which their slots depend, though they have ended."""
        return counting((_for_core(record.spec) for record in self._records.values()), now)

    async def query(self, message: ReservationsQuery, envelope: Envelope) -> Reservations:
        """All that have not ended."""
        return Reservations(reservations=self.present(time.time()))

    async def reserve(self, message: ReserveSlots, envelope: Envelope) -> Reservations:
        """Makes a reservation; the same one again is no error.

        Raises:
            NotFound: there is no such job.
            Conflict: it is over already, or before it starts; another one has its name; its slots are kept
                for others at the same time; or there are too many.
        """
        spec, now = message.spec, time.time()
        if spec.end_at <= spec.start_at:
            raise Conflict(f"reservation {spec.name}: it ends before it starts: give a later end")
        if spec.user and spec.job:
            raise Conflict(f"reservation {spec.name}: it is for a user or for a job: leave one of them out")
        if spec.end_at <= now:
            raise Conflict(f"reservation {spec.name}: it would be over already: give a later end")
        if spec.job and spec.job not in self._jobs:
            raise NotFound(
                f"reservation {spec.name}: no job {spec.job} waits or runs: `dmsc jobs` lists them"
            )
        async with self._turn:
            before = self._records.get(spec.name)
            if before is not None and before.spec.end_at > now:
                if before.spec == spec:
                    return Reservations(reservations=self.present(now))
                raise Conflict(
                    f"reservation {spec.name} is there already: give another name, or cancel it first"
                )
            if len(self.present(now)) >= MOST_RESERVATIONS:
                raise Conflict(
                    f"reservation {spec.name}: there are {MOST_RESERVATIONS} already, the most that may be: "
                    "release one first"
                )
            if why := too_many(_for_core(spec), self.kept(now), self._table()):
                raise Conflict(why)
            await self._forget_past(now)
            record = SlotsReserved(spec=spec, by=message.by, at=now)
            await self._bucket.put(record, reservation=spec.name)
            self._records[spec.name] = record
            log.info("slots reserved", name=spec.name, slots=spec.slots, by=message.by)
        self._changed()
        return Reservations(reservations=self.present(now))

    async def cancel(self, message: CancelReservation, envelope: Envelope) -> Reservations:
        """
        Raises:
            NotFound: there is no such reservation.
        """
        async with self._turn:
            now = time.time()
            present = {record.spec.name: record for record in self.present(now)}
            if (record := present.get(message.name)) is None:
                raise NotFound(f"no reservation {message.name}; there are {', '.join(present) or 'none'}")
            if record.spec.start_at < now:  # others may have their slots beside it
                over = record.model_copy(update={"spec": record.spec.model_copy(update={"end_at": now})})
                await self._bucket.put(over, reservation=message.name)
                self._records[message.name] = over
            else:
                await self._bucket.delete(reservation=message.name)
                del self._records[message.name]
            log.info("reservation cancelled", name=message.name, by=message.by)
        self._changed()
        return Reservations(reservations=self.present(time.time()))

    async def _forget_past(self, now: float) -> None:
        names = [each.name for each in self.kept(now)][: 2 * MOST_RESERVATIONS]
        for name in list(self._records):
            if name not in names:
                await self._bucket.delete(reservation=name)
                del self._records[name]


def _for_core(spec: ReservationSpec) -> SlotReservation:
    return SlotReservation(
        name=spec.name,
        start_at=spec.start_at,
        end_at=spec.end_at,
        count=spec.slots,
        needs=SlotNeeds(
            clusters=tuple(sorted(spec.clusters)),
            kind=spec.device,
            labels=tuple(sorted(spec.labels.items())),
        ),
        tenant=spec.user,
        job=spec.job,
    )
