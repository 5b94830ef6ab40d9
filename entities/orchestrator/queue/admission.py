"""Whether a user's quota allows one more job, or a wider one; admissions are decided one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from schemas.arrays import SubmitArray
from schemas.errors import OverQuota
from schemas.gateway_api import ResumeJob, ScaleJob, SubmitJob
from schemas.job import JobRecord, JobSpec
from schemas.quota import Quota, QuotaUse, asked_for, asked_for_array, slots_of, used_by, wider_by


class JobAdmission:
    """Checks quotas. `records`: all jobs that have not ended, with everything that was admitted.

    A caller holds `turn` from the check until the admitted job is among `records`.
    """

    def __init__(self, records: Callable[[], Iterable[JobRecord]]) -> None:
        self.turn = asyncio.Lock()
        self._records = records

    def submission(self, message: SubmitJob) -> None:
        """Checks a submission.

        Raises:
            OverQuota: the user has as many jobs or slots as the quota allows.
        """
        self._check(message.quota, message.user, asked_for(message.spec))

    def array(self, message: SubmitArray, specs: Iterable[JobSpec]) -> None:
        """Checks the submission of an array.

        Raises:
            OverQuota: its members that may run at a time would be more than the quota allows.
        """
        try:
            self._check(message.quota, message.user, asked_for_array(specs, message.limit))
        except OverQuota as error:
            raise OverQuota(
                f"{error.text}; array.limit says how many run at a time", **error.fields
            ) from None

    def scaling(self, message: ScaleJob, record: JobRecord) -> None:
        """Checks a change of replicas; an operator may widen another user's job beyond that user's quota.

        Raises:
            OverQuota: the user has as many slots as the quota allows.
        """
        if message.user == record.user:
            wider = wider_by(record, message.stage, message.replicas, message.unit)
            self._check(message.quota, message.user, QuotaUse(slots=wider))

    def reshaping(self, message: ResumeJob, record: JobRecord, spec: JobSpec) -> None:
        """Checks the shape in which a parked job goes on; see `scaling`.

        Raises:
            OverQuota: the user has as many slots as the quota allows.
        """
        if message.user == record.user:
            wider = asked_for(spec).slots - slots_of(record)
            self._check(message.quota, message.user, QuotaUse(slots=max(0, wider)))

    def _check(self, quota: Quota | None, user: str, more: QuotaUse) -> None:
        excess = "" if quota is None else quota.excess(used_by(user, self._records()), more)
        if excess:
            raise OverQuota(excess, user=user)
