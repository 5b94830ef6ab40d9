"""The pools' records: read once a term, changed by compare-and-set, one change after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bus import subjects
from bus.connection import Bus
from schemas.errors import Conflict
from schemas.machines.records import PoolRecord

Change = Callable[[PoolRecord], PoolRecord]


class PoolBook:
    """What is written of each pool. Of two leaders that write the same one, the later is refused."""

    def __init__(self, bus: Bus, pools: Iterable[str]) -> None:
        self._bucket = bus.bucket(subjects.MACHINE_POOL)
        self._records = {name: PoolRecord(pool=name) for name in pools}
        self._revisions = dict.fromkeys(self._records, 0)
        self._turn = asyncio.Lock()

    def record(self, pool: str) -> PoolRecord:
        """What is written of a pool."""
        return self._records[pool]

    async def load(self) -> None:
        """Reads all records, as the bucket's leader has them.

        Raises:
            DmscError: the bus is away, or a record is of a newer version.
        """
        async with self._turn:
            for pool in self._records:
                await self._read(pool)

    async def abandoned(self) -> dict[str, int]:
        """Pools that are not in the file any more, and how many machines they still have."""
        found = [entry.message for entry in await self._bucket.entries()]
        records = [each for each in found if isinstance(each, PoolRecord) and each.pool not in self._records]
        return {each.pool: len(each.machines) for each in records if each.machines}

    async def _read(self, pool: str) -> None:
        entry = await self._bucket.get(leader=True, pool=pool)
        self._revisions[pool] = 0 if entry is None else entry.revision
        found = None if entry is None else entry.message
        self._records[pool] = found if isinstance(found, PoolRecord) else PoolRecord(pool=pool)

    async def change(self, pool: str, change: Change) -> tuple[PoolRecord, PoolRecord]:
        """Writes what `change` makes of a pool's record; returns it before and after.

        Raises:
            Conflict: another leader has written meanwhile; the record is read anew, and nothing is changed.
            DmscError: the bus is away. Whether it was written is not known: it is read anew before the next.
        """
        async with self._turn:
            if self._revisions[pool] < 0:
                await self._read(pool)
            before = self._records[pool]
            after = change(before)
            if after == before:
                return before, before
            revision, self._revisions[pool] = self._revisions[pool], -1
            try:
                if revision:
                    written = await self._bucket.update(after, revision=revision, pool=pool)
                else:
                    written = await self._bucket.create(after, pool=pool)
            except Conflict:
                await self._read(pool)
                raise
            self._records[pool], self._revisions[pool] = after, written
            return before, after
