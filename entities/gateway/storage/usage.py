"""What each user has stored on the bus, and whether there is room for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bus import subjects
from bus.connection import Bus
from entities.gateway.feeds.feed_log import FeedLog
from entities.gateway.storage.uploads import OWN_FOLDERS, Uploads, is_in_own_folder
from schemas.data_set.builds import BuildRecord, DataSetVersion
from schemas.errors import OverQuota
from schemas.gateway_api import UploadHold
from schemas.job import JobRecord
from schemas.quota import QuotaUse, used_by
from schemas.signals import AccessDecision
from schemas.urls import BUILT_FOLDER

DATASETS = "datasets"
"""The folder of data sets in the object store that users stored as they are."""


class StoredUse:
    """Each user's jobs, slots, data sets, feeds (which count as data sets) and stored bytes.

    `records` returns all known jobs, ended or not.
    """

    def __init__(
        self, bus: Bus, records: Callable[[], Iterable[JobRecord]], feeds: FeedLog | None = None
    ) -> None:
        self._bus = bus
        self._feeds = feeds or FeedLog(bus)
        self._owners = bus.bucket(subjects.DATASET_OWNER)
        self._versions = bus.bucket(subjects.DATA_SET_VERSION)
        self._builds = bus.bucket(subjects.BUILD_RECORD)
        self._records = records
        self.uploads = Uploads(bus, self._count)

    async def of(self, user: str) -> QuotaUse:
        """The user's jobs, slots, data sets, and bytes on the bus."""
        return (await self._count(user, ()))[0]

    async def _count(
        self, user: str, on_their_way: tuple[UploadHold, ...]
    ) -> tuple[QuotaUse, frozenset[str]]:
        """The user's use with `on_their_way` counted in, and the names of their data sets.

        An upload whose object is stored already counts once.
        """
        records = tuple(self._records())
        jobs = {record.job for record in records if record.user == user}
        owned_names = {
            entry.message.name for entry in await self._owners.entries() if entry.message.user == user
        }
        built = await self._built(user)
        stored_bytes, names, stored_nuids = 0, set(built), set()
        for info in await self._bus.objects.list():
            folder, _, name = info.name.partition("/")
            if folder in OWN_FOLDERS:
                is_owned = name.startswith(f"{user}/")
            elif folder == BUILT_FOLDER:
                is_owned = name.partition("/")[0] in built
            else:
                is_owned = (
                    name in owned_names if folder == DATASETS else not jobs.isdisjoint(info.name.split("/"))
                )
            stored_bytes += info.size if is_owned else 0
            if is_owned and folder in (DATASETS, *OWN_FOLDERS):
                stored_nuids.add(info.nuid)
            if is_owned and folder == DATASETS:
                names.add(name)
        pending = [hold for hold in on_their_way if hold.upload not in stored_nuids]
        names |= {hold.name for hold in pending if not is_in_own_folder(hold.name)}
        stored_bytes += sum(hold.size_bytes for hold in pending)
        own = [feed for feed in await self._feeds.all() if feed.user == user]
        stored_bytes += sum(feed.stored_bytes for feed in await self._feeds.views(own))
        use = used_by(user, records).plus(QuotaUse(stored_bytes=stored_bytes, datasets=len(names) + len(own)))
        return use, frozenset(names)

    async def _built(self, user: str) -> set[str]:
        """Names of the data sets of which the user has built the first version, or has a build's work."""
        first: dict[str, DataSetVersion] = {}
        for entry in await self._versions.entries():
            row: DataSetVersion = entry.message
            if row.name not in first or row.version < first[row.name].version:
                first[row.name] = row
        names = {name for name, row in first.items() if row.built_by == user}
        for entry in await self._builds.entries():
            record: BuildRecord = entry.message
            if record.user == user and record.keeps_work and record.spec.name not in first:
                names.add(record.spec.name)
        return names

    async def admit_job(self, access: AccessDecision) -> None:
        """Admits a job while at least one byte is free: how much the job will write is unknown.

        Raises:
            OverQuota: no byte is left of the user's quota.
        """
        if access.quota is None or access.quota.stored_bytes is None:
            return
        use, _ = await self._count(access.user, await self.uploads.of(access.user))
        excess = access.quota.excess(use, QuotaUse(stored_bytes=1))
        if excess:
            raise OverQuota(excess, user=access.user)
