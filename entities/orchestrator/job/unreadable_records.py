"""Unreadable values in the orchestrator's buckets (ADR-0038).

The bytes of such a value are kept on the stream `UNREADABLE`; the last known record takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.messaging.key_value import KeyValueEntry, Watch
from entities.orchestrator.job.job_run import JobRun
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.job import JobRecord
from schemas.unreadable import UnreadableNote, UnreadableValue

log = get_logger("orchestrator")

SHOWN = 32
"""Most unreadable values that the mesh's status shows: the newest."""
GUARDED = (
    *(subjects.CORDON, subjects.MODULE_RECORD, subjects.MODULE_STANDING, subjects.LINK_SECRET),
    *(subjects.BUILD_RECORD, subjects.DATA_SET_VERSION),
)
"""Buckets that are seldom written: here the former value is written again. The writers of the buckets `steps`
and `leadership` do that themselves."""


class RecordGuards:
    """Guards the buckets during one term. `runs`: its running jobs, by id; `ended`: records of the others.

    `shown_s`: how long the mesh's status shows an unreadable value.
    """

    def __init__(
        self,
        bus: Bus,
        runs: Mapping[str, JobRun],
        ended: Mapping[str, JobRecord],
        *,
        shown_s: float = 7 * 86_400.0,
    ) -> None:
        self._shown_s = shown_s
        self._bus = bus
        self._runs = runs
        self._ended = ended
        self._watches: list[Watch | Subscription] = []
        self._notes: dict[tuple[str, str], UnreadableNote] = {}  # the last note of each record, newest last

    def notes(self) -> tuple[UnreadableNote, ...]:
        """The values that any process found unreadable within `shown_s`, and where their bytes are."""
        return tuple(note for note in self._notes.values() if note.at > time.time() - self._shown_s)

    async def start(self) -> None:
        """Reads the latest notes and guards the buckets; call it once the jobs are taken up."""
        row = subjects.UNREADABLE
        last = await self._bus.last_sequence(row)
        async for item in self._bus.history(row, start=max(1, last - SHOWN + 1)):
            self._note(item.message, item.sequence)
        self._watches.append(await self._bus.subscribe(row, self._heard))
        self._watches.append(await self._bus.bucket(subjects.JOB_RECORD).guard(self._mend_job))
        for guarded in GUARDED:
            self._watches.append(await self._bus.bucket(guarded).guard())

    async def stop(self) -> None:
        for watch in self._watches:
            await watch.stop(drain=False)

    async def _heard(self, message: UnreadableValue, envelope: Envelope) -> None:
        if message.part:
            return
        try:
            sequence = await self._bus.last_sequence(subjects.UNREADABLE)
        except DmscError:
            sequence = 0
        self._note(message, sequence)

    def _note(self, message: object, sequence: int) -> None:
        if isinstance(message, UnreadableValue) and not message.part:
            fields = message.model_dump(include=UnreadableNote.model_fields.keys() - {"sequence"})
            self._notes.pop((message.bucket, message.key), None)
            self._notes[message.bucket, message.key] = UnreadableNote(**fields, sequence=sequence)
            while len(self._notes) > SHOWN:
                del self._notes[next(iter(self._notes))]

    async def _mend_job(self, job: str, revision: int) -> None:
        """Writes a job's record again from memory, or else its former value.

        A running job's store notices by itself that its record was overwritten.
        """
        bucket = self._bus.bucket(subjects.JOB_RECORD)
        if run := self._runs.get(job):
            await run.job.store.note(now=True)
        elif ended := self._ended.get(job):
            await bucket.update(ended, revision=revision, job=job)
        else:
            await bucket.put_back(job, revision)


def above_all(entry: KeyValueEntry) -> JobRecord:
    """The record, with an epoch that is not below any that was ever used.

    Where the present value can't be read, it may be that of a later epoch. Each epoch took at least one
    write, so none is above the revision.
    """
    record: JobRecord = entry.message
    return record.model_copy(update={"epoch": max(record.epoch, entry.revision)}) if entry.stale else record
