"""The objects that each job and build may use, as a broker reads them from the orchestrator's records."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from bus import subjects
from bus.guard.broker_caller import EVERY, BrokerCaller
from bus.guard.call_rights import ObjectNames, names_of, names_of_build
from schemas.base import is_token
from schemas.data_set.builds import BuildRecord, is_build
from schemas.envelope import EntityKind as K
from schemas.job import JobRecord

if TYPE_CHECKING:
    from bus.connection import Bus

MOST_JOBS = 1_024


class JobObjects:
    """Reads a job's record on demand and caches the resulting object names for `fresh_s`.

    A job's specification never changes, but the job may disappear.
    """

    def __init__(self, bus: Bus, *, fresh_s: float = 5.0) -> None:
        self._fresh_s = fresh_s
        self._bucket = bus.bucket(subjects.JOB_RECORD)
        self._builds = bus.bucket(subjects.BUILD_RECORD)
        self._cache: OrderedDict[str, tuple[float, ObjectNames]] = OrderedDict()

    async def names(self, asker: BrokerCaller) -> ObjectNames:
        """The objects of the asker's job; none if there is no such job.

        Raises:
            Unavailable, DeadlineExceeded: the bucket can't be read now.
        """
        if asker.kind != K.INSTANCE:
            return ObjectNames()
        if asker.scope == EVERY:
            return ObjectNames(every=True)
        if not is_token(asker.scope):
            return ObjectNames()
        now = time.monotonic()
        cached = self._cache.get(asker.scope)
        if cached is not None and now - cached[0] < self._fresh_s:
            return cached[1]
        names = await self._names(asker.scope)
        self._cache[asker.scope] = (now, names)
        while len(self._cache) > MOST_JOBS:
            self._cache.popitem(last=False)
        return names

    async def _names(self, scope: str) -> ObjectNames:
        record = await self._record(scope)
        if record is None and is_build(scope):
            entry = await self._builds.get(leader=True, build=scope)
            if entry is not None and isinstance(entry.message, BuildRecord):
                return names_of_build(entry.message)
        return names_of(record)

    async def user_of(self, job: str) -> str:
        """The user who submitted the job; empty if there is no such job.

        Raises:
            Unavailable, DeadlineExceeded: the bucket can't be read now.
        """
        record = await self._record(job) if is_token(job) else None
        return "" if record is None else record.user

    async def _record(self, job: str) -> JobRecord | None:
        entry = await self._bucket.get(leader=True, job=job)
        return entry.message if entry is not None and isinstance(entry.message, JobRecord) else None
