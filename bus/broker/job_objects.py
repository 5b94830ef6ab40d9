"""What a broker knows of jobs: the objects that each may use, from the orchestrator's records."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from bus import subjects
from bus.guard.broker_caller import EVERY, BrokerCaller
from bus.guard.call_rights import ObjectNames, names_of
from schemas.base import is_token
from schemas.envelope import EntityKind as K
from schemas.job import JobRecord

if TYPE_CHECKING:
    from bus.connection import Bus

FRESH_S = 5.0
"""A job's specification stays; that it is there at all is looked at again after this."""
MOST_JOBS = 1_024


class JobObjects:
    """Reads a job's record when it is asked for, and remembers for a moment what follows from it."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = bus.bucket(subjects.JOB_RECORD)
        self._known: OrderedDict[str, tuple[float, ObjectNames]] = OrderedDict()

    async def names(self, asker: BrokerCaller) -> ObjectNames:
        """The objects of the asker's job; none where there is no such job.

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
        known = self._known.get(asker.scope)
        if known is not None and now - known[0] < FRESH_S:
            return known[1]
        found = names_of(await self._record(asker.scope))
        self._known[asker.scope] = (now, found)
        while len(self._known) > MOST_JOBS:
            self._known.popitem(last=False)
        return found

    async def user_of(self, job: str) -> str:
        """Who submitted the job; empty where there is none.

        Raises:
            Unavailable, DeadlineExceeded: the bucket can't be read now.
        """
        record = await self._record(job) if is_token(job) else None
        return "" if record is None else record.user

    async def _record(self, job: str) -> JobRecord | None:
        entry = await self._bucket.get(leader=True, job=job)
        return entry.message if entry is not None and isinstance(entry.message, JobRecord) else None
