"""What users have stored on the bus, and whose a data set is: asked when a job or a data set is handed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from bus import subjects
from bus.connection import Bus
from entities.gateway.storage.uploads import Upload, Uploads
from schemas.door import UploadHold
from schemas.errors import OverQuota
from schemas.job import JobRecord
from schemas.quota import QuotaUse, used_by
from schemas.signals import AccessDecision

DATASETS = "datasets"
"""The folder of data sets in the object store."""


class StoredUse:
    """`records`: all jobs that are known, ended ones too."""

    def __init__(self, bus: Bus, records: Callable[[], Iterable[JobRecord]]) -> None:
        self._bus = bus
        self._owners = bus.bucket(subjects.DATASET_OWNER)
        self._records = records
        self._uploads = Uploads(bus, self._count)

    async def of(self, user: str) -> QuotaUse:
        """All that a user has: jobs, slots, data sets, and bytes on the bus."""
        return (await self._count(user, ()))[0]

    async def _count(
        self, user: str, on_their_way: tuple[UploadHold, ...]
    ) -> tuple[QuotaUse, frozenset[str]]:
        """… with uploads that have not arrived, each counted once; and the names of their data sets."""
        records = tuple(self._records())
        jobs = {record.job for record in records if record.user == user}
        mine = {entry.message.name for entry in await self._owners.entries() if entry.message.user == user}
        stored, names, arrived = 0, set(), set()
        for info in await self._bus.objects.list():
            folder, _, name = info.name.partition("/")
            owned = name in mine if folder == DATASETS else not jobs.isdisjoint(info.name.split("/"))
            stored += info.size if owned else 0
            if folder == DATASETS and owned:
                names.add(name)
                arrived.add(info.nuid)
        coming = [hold for hold in on_their_way if hold.upload not in arrived]
        names |= {hold.name for hold in coming}
        stored += sum(hold.size_bytes for hold in coming)
        use = used_by(user, records).plus(QuotaUse(stored_bytes=stored, datasets=len(names)))
        return use, frozenset(names)

    async def admit_job(self, access: AccessDecision) -> None:
        """A job writes what nobody knows yet: it may begin while there is room at all.

        Raises:
            OverQuota: there is none left.
        """
        if access.quota is None or access.quota.stored_bytes is None:
            return
        use, _ = await self._count(access.user, await self._uploads.of(access.user))
        excess = access.quota.excess(use, QuotaUse(stored_bytes=1))
        if excess:
            raise OverQuota(excess, user=access.user)

    def upload(
        self, access: AccessDecision, name: str, size: int, hold_s: float
    ) -> AbstractAsyncContextManager[Upload]:
        """See `Uploads.begin`."""
        return self._uploads.begin(access, name, size, hold_s)

    async def removed(self, name: str) -> None:
        """Nobody owns a data set of that name any more."""
        await self._uploads.removed(name)
