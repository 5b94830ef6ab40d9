"""Whose a row of the accounts is: by the records of jobs. Pure."""

from __future__ import annotations

from typing import NamedTuple

from entities.accountant.ledger import RowKey
from entities.accountant.service_use import job_and_user
from schemas.job import JobRecord


class Payer(NamedTuple):
    """A user and their tenant, and the service of which the job is a version; empty where unknown."""

    user: str = ""
    tenant: str = ""
    service: str = ""


class Payers:
    """Whose jobs are, and the tenants of those who have some."""

    def __init__(self) -> None:
        self._jobs: dict[str, Payer] = {}
        self._tenants: dict[str, str] = {}

    def take(self, record: JobRecord) -> None:
        """A job's record."""
        serve, tenant = record.spec.serve, record.queue_share.tenant
        self._jobs[record.job] = Payer(record.user, tenant, "" if serve is None else serve.service)
        if tenant:
            self._tenants[record.user] = tenant

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def job(self, job: str) -> Payer:
        """Whose a job is."""
        return self._jobs.get(job, Payer())

    def of(self, key: RowKey) -> Payer:
        """Whose a row is."""
        if key.payer_kind == "job":
            return self.job(key.payer)
        if key.payer_kind == "service":
            job, user = job_and_user(key.payer)
            return Payer(user, self._tenants.get(user, ""), self.job(job).service)
        return Payer()
