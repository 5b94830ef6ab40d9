"""What users have stored on the bus, and whose a data set is: asked when a job or a data set is handed in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from bus import subjects
from bus.connection import Bus
from schemas.door import DatasetOwner
from schemas.errors import OverQuota, Refused
from schemas.job import JobRecord
from schemas.quota import QuotaUse, used_by
from schemas.signals import AccessDecision, Role

DATASETS = "datasets"
"""The folder of data sets in the object store."""


class StoredUse:
    """`records`: all jobs that are known, ended ones too."""

    def __init__(self, bus: Bus, records: Callable[[], Iterable[JobRecord]]) -> None:
        self._bus = bus
        self._owners = bus.bucket(subjects.DATASET_OWNER)
        self._records = records

    async def of(self, user: str) -> QuotaUse:
        """All that a user has: jobs, slots, data sets, and bytes on the bus."""
        records = tuple(self._records())
        jobs = {record.job for record in records if record.user == user}
        mine = {entry.message.name for entry in await self._owners.entries() if entry.message.user == user}
        stored, datasets = 0, 0
        for info in await self._bus.objects.list():
            folder, _, name = info.name.partition("/")
            owned = name in mine if folder == DATASETS else not jobs.isdisjoint(info.name.split("/"))
            stored += info.size if owned else 0
            datasets += folder == DATASETS and owned
        return used_by(user, records).plus(QuotaUse(stored_bytes=stored, datasets=datasets))

    async def admit_job(self, access: AccessDecision) -> None:
        """A job writes what nobody knows yet: it may begin while there is room at all.

        Raises:
            OverQuota: there is none left.
        """
        if access.quota is not None and access.quota.stored_bytes is not None:
            await self._admit(access, QuotaUse(stored_bytes=1))

    async def admit_dataset(self, access: AccessDecision, name: str, size: int) -> int | None:
        """Whether `size` bytes may be stored under `name`; returns how many there may be at most, None: any.

        Raises:
            OverQuota: the user's limit of data sets or bytes is reached.
            Refused: the data set is another user's.
        """
        owner = await self.owner(name)
        if owner and owner != access.user and access.role not in (Role.OPERATOR, Role.ADMIN):
            raise Refused(f"data set {name} is {owner}'s; store yours under another name", user=access.user)
        if access.quota is None:
            return None
        use = await self._admit(access, QuotaUse(stored_bytes=max(1, size), datasets=not owner))
        most = access.quota.stored_bytes
        return None if most is None else max(0, most - use.stored_bytes)

    async def _admit(self, access: AccessDecision, more: QuotaUse) -> QuotaUse:
        assert access.quota is not None
        use = await self.of(access.user)
        excess = access.quota.excess(use, more)
        if excess:
            raise OverQuota(excess, user=access.user)
        return use

    async def owner(self, name: str) -> str:
        """Who stored the data set; empty where nobody knows."""
        entry = await self._owners.get(key=_key(name))
        return "" if entry is None else str(entry.message.user)

    async def stored(self, name: str, user: str) -> None:
        """From now on the data set counts as this user's; one that had an owner stays theirs."""
        if not await self.owner(name):
            await self._owners.put(DatasetOwner(name=name, user=user), key=_key(name))

    async def removed(self, name: str) -> None:
        await self._owners.delete(key=_key(name))


def _key(name: str) -> str:
    """A data set's name may have dots, which a key's token has not."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
