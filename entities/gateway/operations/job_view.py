"""A local copy of the bucket of job records, kept by a watch: reading a job costs no message."""

from __future__ import annotations

import asyncio

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from entities.patient_watch import watching
from schemas.job import ENDED, JobRecord


class JobCache:
    """Job records by id, moments behind the orchestrator; a running job's figures lag at most a second."""

    def __init__(self, bus: Bus) -> None:
        self.current = asyncio.Event()
        self._bucket = bus.bucket(subjects.JOB_RECORD)
        self._records: dict[str, JobRecord] = {}

    async def run(self) -> None:
        """Watches the bucket until cancelled."""
        async with watching(self._bucket, self._changed):
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.current.clear()  # whoever reads jobs from now on asks the orchestrator

    async def _changed(self, change: Change) -> None:
        if not change.key:
            self.current.set()
        elif isinstance(change.message, JobRecord):
            self.take(change.message)
        else:
            self._records.pop(change.key, None)

    def take(self, record: JobRecord) -> None:
        """Stores a record from the bucket or from an answer; one older than the known record is ignored."""
        known = self._records.get(record.job)
        if known is None or (known.epoch, known.changed_at) <= (record.epoch, record.changed_at):
            self._records[record.job] = record

    def get(self, job: str) -> JobRecord | None:
        return self._records.get(job)

    def all(self) -> tuple[JobRecord, ...]:
        return tuple(self._records.values())

    def has_ended(self, job: str) -> bool:
        """Whether the job's record says that it ended; False for an unknown job."""
        record = self._records.get(job)
        return record is not None and record.state in ENDED
