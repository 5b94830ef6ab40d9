"""The jobs whose weights are to be registered: each once, whatever was killed meanwhile (ADR-0120)."""

from __future__ import annotations

import asyncio

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change
from bus.tasks import TaskSet
from entities.model_registry.registration import WeightsRegistration, refused_for_good
from entities.model_registry.version_writer import VersionWriter
from schemas.errors import DmscError
from schemas.job import JobRecord, JobState
from schemas.models.commands import ModelSource, MoveAlias, RegisterModel
from schemas.models.reference import RegisterSpec
from schemas.models.version import ModelVersion

log = get_logger("models")


def to_register(record: JobRecord) -> RegisterSpec | None:
    """What becomes of the weights of this job now; None: nothing, or not yet."""
    done = record.state is JobState.DONE and record.weights is not None
    return record.spec.register if done else None


class FinishedJobs:
    """Watches the jobs' records. A record that was there before counts as one that comes: nothing is missed.

    `retry_s`: between attempts while the bus, or a node that has the files, is away.
    """

    def __init__(
        self, bus: Bus, registration: WeightsRegistration, writer: VersionWriter, *, retry_s: float = 2.0
    ) -> None:
        self._bus = bus
        self._registration = registration
        self._writer = writer
        self._retry_s = retry_s
        self._waiting: asyncio.Queue[JobRecord] = asyncio.Queue()
        self._handled: set[str] = set()

    async def run(self) -> None:
        """Registers until cancelled, job after job; one that can't be now comes again at the end."""
        self._handled.clear()
        again = TaskSet()
        watch = await self._bus.bucket(subjects.JOB_RECORD).watch(self._changed)
        try:
            while True:
                record = await self._waiting.get()
                if not await self._is_settled(record):
                    again.create(self._wait_again(record))
        finally:
            await watch.stop()
            await again.close()

    async def _wait_again(self, record: JobRecord) -> None:
        await asyncio.sleep(self._retry_s)
        self._waiting.put_nowait(record)

    async def _changed(self, change: Change) -> None:
        record = change.message
        if isinstance(record, JobRecord) and record.job not in self._handled and to_register(record):
            self._handled.add(record.job)
            self._waiting.put_nowait(record)

    async def _is_settled(self, record: JobRecord) -> bool:
        """Registers a job's weights; False if that can't be done now, but perhaps later."""
        try:
            await self._register(record)
        except DmscError as error:
            if not refused_for_good(error):
                log.info("weights not registered yet", job=record.job, reason=error.text)
                return False
            log.warning("weights not registered", job=record.job, reason=error.text)
        return True

    async def _register(self, record: JobRecord) -> None:
        wanted = to_register(record)
        assert wanted is not None
        version = self._writer.index.of_job(wanted.name, record.job)
        if version is None:
            source = ModelSource(job=record.job)
            asked = RegisterModel(name=wanted.name, source=source, notes=wanted.notes, user=record.user)
            version = (await self._registration.register(asked, record)).version
        if wanted.alias is not None and version.removed_at is None:
            await self._move(record, wanted.alias, version)

    async def _move(self, record: JobRecord, alias: str, version: ModelVersion) -> None:
        """Moves the alias that the job file names, once: a person may have moved it on since."""
        command = f"job.{record.job}"
        if self._writer.was_moved_by(version.name, alias, command):
            return
        move = MoveAlias(
            name=version.name,
            alias=alias,
            version=version.version,
            reason=f"job {record.job} is done",
            user=record.user,
        )
        try:
            await self._writer.move(move, command)
        except DmscError as error:
            if not refused_for_good(error):
                raise
            log.warning("alias not moved", model=version.reference, alias=alias, reason=error.text)
