"""Quotas: whether a user's allows one more job, or a wider one; and what is each tenant's in the queue.

Admissions are decided one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from entities.orchestrator.queue.mesh_slots import tenant_account
from entities.queue.queue_rules import QueueOrder
from entities.queue.queued_job import lanes_of
from entities.queue.scheduling import QueueSurroundings
from entities.queue.tenant_shares import DecayedUse, TenantQuota
from schemas.arrays import SubmitArray
from schemas.data_set.builds import BUILD_ENDED, BuildRecord
from schemas.errors import OverQuota
from schemas.gateway_api import ResumeJob, ScaleJob, SubmitJob
from schemas.job import ENDED, JobRecord, JobSpec
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


def quotas_of(records: Iterable[JobRecord], *, fair: bool) -> dict[str, TenantQuota]:
    """What is each user's or tenant's own, and the most, as the last one of their jobs was submitted with.

    `fair`: the order is that of shares; under others only the most counts.
    """
    newest: dict[str, JobRecord] = {}
    for record in records:
        account = tenant_account(record) or record.user
        if account not in newest or newest[account].submitted_at < record.submitted_at:
            newest[account] = record
    found = {}
    for account, record in newest.items():
        own, share = record.guaranteed_slots if fair else None, record.queue_share
        most = share.running_slots
        if own is not None and most is not None:
            own = min(own, most)  # whoever sent the quota may not have compared them
        if own is not None or most is not None or (fair and share.weight != 1.0):
            found[account] = TenantQuota(slots=own, most=most, weight=share.weight)
    return found


def count_use(use: DecayedUse, record: JobRecord | BuildRecord, now: float) -> None:
    """Counts for its user what a job or build has used until now, or until it ended."""
    usage, build = record.usage, isinstance(record, BuildRecord)
    if usage.slots and record.state not in (BUILD_ENDED if build else ENDED):
        usage = usage.held(usage.slots, now)
    if usage.slot_s and usage.counted_at is not None:
        account = lanes_of(record.user) if isinstance(record, BuildRecord) else tenant_account(record)
        use.add(account or record.user, usage.slot_s, usage.held_s, usage.counted_at)


def with_shares(
    around: QueueSurroundings,
    used: DecayedUse,
    jobs: Sequence[JobRecord],
    builds: Sequence[BuildRecord],
    now: float,
) -> QueueSurroundings:
    """With the slots that are each user's or tenant's own, and with what their jobs and builds have used."""
    fair = around.rules.order is QueueOrder.FAIR
    around = replace(around, quotas=quotas_of(jobs, fair=fair))
    if not fair:
        return around
    for job in jobs:
        count_use(used, job, now)
    for build in builds:
        count_use(used, build, now)
    return replace(around, used_slot_s=used.at(now))
