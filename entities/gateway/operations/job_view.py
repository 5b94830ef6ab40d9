"""The jobs as their bucket has them, watched: reading one costs nobody a message."""

from __future__ import annotations

import asyncio

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change
from schemas.errors import DmscError
from schemas.job import ENDED, JobRecord

log = get_logger("gateway")

RETRY_S = 0.5
"""Between attempts to begin the watch while the bus is not ready."""


class JobCache:
    """Records by job, at most moments behind the orchestrator; figures of a running job at most a second."""

    def __init__(self, bus: Bus) -> None:
        self.current = asyncio.Event()
        self._bucket = bus.bucket(subjects.JOB_RECORD)
        self.revision = 0  # another one after each change
        self._records: dict[str, JobRecord] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                watch = await self._bucket.watch(self._changed)
                break
            except DmscError as error:
                log.info("jobs can't be watched yet", code=error.code, error=error.text)
                await asyncio.sleep(RETRY_S)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await watch.stop()

    async def _changed(self, change: Change) -> None:
        if not change.key:
            self.current.set()
        elif isinstance(change.message, JobRecord):
            self.take(change.message)
        elif self._records.pop(change.key, None) is not None:
            self.revision += 1

    def take(self, record: JobRecord) -> None:
        """What the orchestrator answered, or the bucket has; an older account of a job counts for nothing."""
        known = self._records.get(record.job)
        if known is None or (known.epoch, known.changed_at) <= (record.epoch, record.changed_at):
            self._records[record.job] = record
            self.revision += 1

    def get(self, job: str) -> JobRecord | None:
        return self._records.get(job)

    def all(self) -> tuple[JobRecord, ...]:
        return tuple(self._records.values())

    def has_ended(self, job: str) -> bool:
        """Whether its record says so; one that is unknown has not."""
        record = self._records.get(job)
        return record is not None and record.state in ENDED
