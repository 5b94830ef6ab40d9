"""Rows of batches and of their units. A batch changes by compare-and-set, a unit's row is created once."""

from __future__ import annotations

from collections.abc import Callable

from bus import subjects
from bus.connection import Bus
from entities.gateway.batches.shared_read import SharedRead
from schemas.base import is_token
from schemas.errors import Conflict, NotFound, Unavailable
from schemas.services.batches import BatchRecord, BatchUnit

ATTEMPTS = 20
"""Attempts to change a record that others change too."""


class BatchLog:
    """All batches of the mesh."""

    def __init__(self, bus: Bus) -> None:
        self._batches = bus.bucket(subjects.BATCH)
        self._units = bus.bucket(subjects.BATCH_UNIT)
        self._all = SharedRead(self._batches.entries)

    async def create(self, record: BatchRecord) -> BatchRecord:
        """Enters a batch; one that is there under its id, from the same request before, is returned."""
        try:
            await self._batches.create(record, batch=record.batch)
        except Conflict:
            return await self.get(record.batch, record.user)
        return record

    async def get(self, batch: str, user: str) -> BatchRecord:
        """A user's own batch. Raises `NotFound`, also of another's."""
        entry = await self._batches.get(leader=True, batch=batch) if is_token(batch) else None
        if entry is None or entry.message.user != user:
            raise NotFound(
                f"there is no batch {batch[:200]!r} of yours; GET /v1/batches lists them",
                reason="batch_not_found",
                param="batch_id",
            )
        found: BatchRecord = entry.message
        return found

    async def each(self, user: str) -> list[BatchRecord]:
        """A user's batches, newest first."""
        entries = await self._all()
        own = [entry.message for entry in entries if entry.message.user == user]
        return sorted(own, key=lambda each: (-each.created_at, each.batch))

    async def change(
        self, batch: str, decide: Callable[[BatchRecord], BatchRecord | None]
    ) -> BatchRecord | None:
        """Changes a record by compare-and-set; `decide` returns None where it is to stay as it is.

        Returns:
            The record as it is then; None: there is none.

        Raises:
            Unavailable: others kept changing it, or the bus is away.
        """
        for _ in range(ATTEMPTS):
            entry = await self._batches.get(leader=True, batch=batch)
            if entry is None:
                return None
            wanted = decide(entry.message)
            if wanted is None:
                found: BatchRecord = entry.message
                return found
            try:
                await self._batches.update(wanted, revision=entry.revision, batch=batch)
            except Conflict:
                continue
            return wanted
        raise Unavailable(
            f"batch {batch} is changed by others at the same time; ask again", retry_after_s=1.0
        )

    async def forget(self, batch: str) -> None:
        """Removes a batch that is over, with its units."""
        for unit in await self.units(batch):
            await self._units.delete(batch=batch, unit=str(unit.unit))
        await self._batches.delete(batch=batch)

    async def units(self, batch: str) -> list[BatchUnit]:
        """The units that are answered, in order."""
        entries = await self._units.entries(batch=batch)
        return sorted((entry.message for entry in entries), key=lambda unit: unit.unit)

    async def commit(self, unit: BatchUnit) -> BatchUnit:
        """Decides a unit's answers: these, or those that another gateway was sooner with."""
        number = str(unit.unit)
        try:
            await self._units.create(unit, batch=unit.batch, unit=number)
        except Conflict:
            entry = await self._units.get(leader=True, batch=unit.batch, unit=number)
            if entry is None:
                raise Unavailable(f"unit {unit.unit} of {unit.batch} is written by others; again") from None
            found: BatchUnit = entry.message
            return found
        return unit
