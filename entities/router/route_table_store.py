"""One cluster's route tables in the bucket, and what the router last wrote there."""

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
    """A table in the bucket; `decision` is None if an earlier or other router process wrote it."""

    revision: int
    decision: TableDecision | None
    at: float


class RouteTables:
    """The tables of all jobs. A table's revision grows with each write, also across router processes."""

    def __init__(self, bus: Bus, cluster: str) -> None:
        self._bucket = bus.bucket(subjects.ROUTE_TABLE)
        self._cluster = cluster
        self._written: dict[tuple[str, int], WrittenTable] = {}

    async def guard(self, mend: Mend) -> Watch:
        """See `Bucket.guard`."""
        return await self._bucket.guard(mend, cluster=self._cluster)

    async def known(self, job: str, stage: int) -> WrittenTable:
        """The last written table of a stage; on the first call the one in the bucket, to continue from.

        Of an unreadable table the record's revision is taken: each table revision took a write, so the
        table's revision is not above it.
        """
        written = self._written.get((job, stage))
        if written is not None:
            return written
        try:
            entry = await self._bucket.get(job=job, cluster=self._cluster, stage=stage)
        except UnreadableRecord as error:
            return WrittenTable(int(error.fields["revision"]), None, -math.inf)
        table = entry.message if entry is not None else None
        return WrittenTable(table.revision if isinstance(table, RouteTable) else 0, None, -math.inf)

    async def write(self, table: RouteTable, decision: TableDecision, now: float) -> None:
        await self._bucket.put(table, job=table.job, cluster=table.cluster, stage=table.stage)
        self._written[table.job, table.stage] = WrittenTable(table.revision, decision, now)

    async def remove(self, job: str) -> None:
        """Remove the tables of an ended job."""
        for key in await self._bucket.keys(job=job, cluster=self._cluster):
            _, _, stage = key.rpartition(".")
            await self._bucket.delete(job=job, cluster=self._cluster, stage=stage)
        self._written = {key: value for key, value in self._written.items() if key[0] != job}

    def overwritten(self, key: str, revision: int, jobs: Container[str]) -> tuple[str, int] | None:
        """Note that the value at a key can't be read; return the stage whose table to write again.

        None if its job is not one of `jobs`: that job may become known later, or the key is removed with it.
        """
        tokens = subjects.ROUTE_TABLE.matches(f"{subjects.ROUTE_TABLE.prefix}.{key}")
        if tokens is None or tokens["job"] not in jobs or not tokens["stage"].isdigit():
            return None
        key_of_stage = tokens["job"], int(tokens["stage"])
        before = self._written.get(key_of_stage)
        highest = max(revision, 0 if before is None else before.revision)
        self._written[key_of_stage] = WrittenTable(highest, None, -math.inf)
        return key_of_stage
