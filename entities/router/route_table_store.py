"""One cluster's route tables as they stand in the bucket, and what the router last wrote there."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Mend, Watch
from entities.router.core import TableDecision
from schemas.data_plane import RouteTable
from schemas.errors import UnreadableRecord


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A table as it stands in the bucket: `decision` None: another router's, or an earlier one's of ours."""

    revision: int
    decision: TableDecision | None
    at: float


class RouteTables:
    """Of all jobs. A table's revision grows with each write, whoever wrote the one before."""

    def __init__(self, bus: Bus, cluster: str) -> None:
        self._bucket = bus.bucket(subjects.ROUTE_TABLE)
        self._cluster = cluster
        self._written: dict[tuple[str, int], WrittenTable] = {}

    async def guard(self, mend: Mend) -> Watch:
        """See `Bucket.guard`."""
        return await self._bucket.guard(mend, cluster=self._cluster)

    async def known(self, job: str, stage: int) -> WrittenTable:
        """At first sight since our start: what stands there, to go on from. One that can't be read took a
        write each time, so its revision was not above the record's."""
        known = self._written.get((job, stage))
        if known is not None:
            return known
        try:
            entry = await self._bucket.get(job=job, cluster=self._cluster, stage=stage)
        except UnreadableRecord as error:
            return WrittenTable(int(error.fields["revision"]), None, -math.inf)
        held = entry.message if entry is not None else None
        return WrittenTable(held.revision if isinstance(held, RouteTable) else 0, None, -math.inf)

    async def write(self, table: RouteTable, decision: TableDecision, now: float) -> None:
        await self._bucket.put(table, job=table.job, cluster=table.cluster, stage=table.stage)
        self._written[table.job, table.stage] = WrittenTable(table.revision, decision, now)

    async def remove(self, job: str) -> None:
        """The job has ended."""
        for key in await self._bucket.keys(job=job, cluster=self._cluster):
            _, _, stage = key.rpartition(".")
            await self._bucket.delete(job=job, cluster=self._cluster, stage=stage)
        self._written = {key: value for key, value in self._written.items() if key[0] != job}

    def overwritten(self, key: str, revision: int, jobs: Container[str]) -> tuple[str, int] | None:
        """What stands at a key can't be read. Returns which stage's table to write again, if its job is one
        of `jobs`; another's may be heard of yet, or is removed with it."""
        found = subjects.ROUTE_TABLE.matches(f"{subjects.ROUTE_TABLE.prefix}.{key}")
        if found is None or found["job"] not in jobs or not found["stage"].isdigit():
            return None
        place = found["job"], int(found["stage"])
        before = self._written.get(place)
        above = max(revision, 0 if before is None else before.revision)
        self._written[place] = WrittenTable(above, None, -math.inf)
        return place
