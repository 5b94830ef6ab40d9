"""Versions of data sets: a new one is one compare-and-set; one that no job reads may be removed."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable

from bus.connection import Bus
from bus.files.artifacts import open_on_bus
from bus.logs import get_logger
from bus.subjects import DATA_SET_VERSION
from schemas.data_set.builds import BuildRecord, DataSetVersion
from schemas.data_set.manifest import MANIFEST_BYTES, DataSetContent, DataSetManifest, manifest_url
from schemas.errors import BadData, Conflict, NotFound
from schemas.job import ENDED, JobRecord

log = get_logger("orchestrator")


class DataSetVersions:
    """The bucket of versions, and the objects of their manifests."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.bucket(DATA_SET_VERSION)

    async def of(self, name: str) -> list[DataSetVersion]:
        """All versions of a data set, removed ones included, in order."""
        entries = await self._bucket.entries(strict=True, name=name)
        return sorted((entry.message for entry in entries), key=lambda row: row.version)

    async def commit(
        self, record: BuildRecord, content: DataSetContent, built_at: float
    ) -> tuple[DataSetVersion, bool]:
        """Makes the content the next version; returns it, and whether it is one that was there already.

        A repetition, by this leader or the next, finds the version that the build has made.

        Args:
            record: the build's record.
            content: what it has built.
            built_at: when its last unit was committed, by its record: each repetition writes equal bytes.

        Raises:
            BadData: the manifest would be too large.
            Unavailable: the bus does not answer; it may have been made.
        """
        while True:
            rows = await self.of(record.spec.name)
            there = [row for row in rows if row.removed_at is None]
            made = next((row for row in rows if row.build == record.build), None)
            if made is not None:
                return made, False
            if there and there[-1].digest == content.digest:
                return there[-1], True
            version = rows[-1].version + 1 if rows else 1
            manifest = DataSetManifest(
                **dict(content),
                version=version,
                store=record.spec.folder,
                built_at=built_at,
                built_by=record.user,
                seconds=max(0.0, built_at - record.submitted_at),
            )
            with contextlib.suppress(Conflict):  # another build was first
                return await self._create(record, manifest), False

    async def _create(self, record: BuildRecord, manifest: DataSetManifest) -> DataSetVersion:
        data = manifest.model_dump_json().encode()
        if len(data) > MANIFEST_BYTES:
            raise BadData(
                f"the manifest has {len(data):,} bytes, at most {MANIFEST_BYTES:,}: raise unit_bytes or "
                "group_units"
            )
        folder, _, name = manifest_url(manifest.name, manifest.version).rpartition("/")
        await open_on_bus(folder, self._bus).put_bytes(name, data)
        shards = [shard for split in manifest.splits.values() for shard in split]
        row = DataSetVersion(
            name=manifest.name,
            version=manifest.version,
            digest=manifest.digest,
            manifest_sha256=hashlib.sha256(data).hexdigest(),
            store=manifest.store,
            content=manifest.content,
            samples={split: manifest.rows(split) for split in manifest.splits},
            tokens={split: manifest.tokens(split) for split in manifest.splits},
            bytes=sum(shard.bytes + shard.index.bytes for shard in shards),
            units=manifest.units,
            rows_in=manifest.rows_in,
            kept=manifest.kept,
            dropped=manifest.dropped,
            licence=manifest.licence,
            build=record.build,
            built_at=manifest.built_at,
            built_by=manifest.built_by,
        )
        await self._bucket.create(row, name=row.name, version=row.version)
        return row

    async def manifest(self, name: str, version: int) -> DataSetManifest:
        """
        Raises:
            NotFound: its object is not there.
        """
        folder, _, file = manifest_url(name, version).rpartition("/")
        data = await open_on_bus(folder, self._bus).get_bytes(file)
        return DataSetManifest.model_validate_json(data)

    async def objects_in(self, name: str, folder: str) -> set[str]:
        """Names of the objects in a folder to which versions of the data set refer."""
        names: set[str] = set()
        for row in await self.of(name):
            if row.removed_at is None and row.store == folder:
                manifest = await self.manifest(name, row.version)
                for split in manifest.splits.values():
                    for shard in split:
                        names |= {shard.name, shard.index.name}
        return names

    async def remove(self, name: str, version: int, user: str, jobs: Iterable[JobRecord]) -> DataSetVersion:
        """Marks a version as removed, and removes its manifest; its number is not given again.

        Raises:
            NotFound: there is no such version.
            Conflict: a job that has not ended reads it.
        """
        entry = await self._bucket.get(leader=True, name=name, version=version)
        if entry is None or entry.message.removed_at is not None:
            raise NotFound(f"there is no data set {name}@{version}; `dmsc data list` shows which there are")
        for record in jobs:
            if record.state not in ENDED and f"{name}@{version}" in lineage_of(record):
                raise Conflict(f"job {record.job} reads {name}@{version}: wait for its end, or cancel it")
        row: DataSetVersion = entry.message.model_copy(update={"removed_at": time.time(), "removed_by": user})
        await self._bucket.update(row, revision=entry.revision, name=name, version=version)
        folder, _, file = manifest_url(name, version).rpartition("/")
        await open_on_bus(folder, self._bus).delete(file)
        log.info("data set version removed", version=row.reference, user=user)
        return row


def lineage_of(record: JobRecord) -> set[str]:
    """The data sets that a job reads, as NAME@VERSION."""
    uses = (part.data_set for part in record.spec.data.places().values())
    return {use.lineage for use in uses if use is not None}
