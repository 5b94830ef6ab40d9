"""Whether one more job, or a wider one, is within what its user may have: decided one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from schemas.door import ScaleJob, SubmitJob
from schemas.errors import OverQuota
from schemas.job import JobRecord
from schemas.quota import Quota, QuotaUse, asked_for, used_by, wider_by


class JobAdmission:
    """`records`: all jobs that have not ended, as they stand now: all that was admitted is in them.
    Whoever admits a job holds `turn` until it is among them."""

    def __init__(self, records: Callable[[], Iterable[JobRecord]]) -> None:
        self.turn = asyncio.Lock()
        self._records = records

    def submission(self, message: SubmitJob) -> None:
        """
        Raises:
            OverQuota: the user has as many jobs or slots as they may.
        """
        self._check(message.quota, message.user, asked_for(message.spec))

    def scaling(self, message: ScaleJob, record: JobRecord) -> None:
        """An operator who widens another's job is not held to the owner's quota.

        Raises:
            OverQuota: the user has as many slots as they may.
        """
        if message.user == record.user:
            wider = wider_by(record, message.stage, message.replicas)
            self._check(message.quota, message.user, QuotaUse(slots=wider))

    def _check(self, quota: Quota | None, user: str, more: QuotaUse) -> None:
        excess = "" if quota is None else quota.excess(used_by(user, self._records()), more)
        if excess:
            raise OverQuota(excess, user=user)
