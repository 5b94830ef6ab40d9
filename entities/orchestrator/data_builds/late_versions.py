"""Versions of data sets that jobs read which were submitted before their build was done (ADR-0088)."""

from __future__ import annotations

from collections.abc import Callable

from entities.orchestrator.data_builds.versions import DataSetVersions
from schemas.data_set.builds import BuildRecord
from schemas.data_set.fitting import read_as, with_sources
from schemas.errors import NotFound
from schemas.job import JobSpec
from schemas.job_file.data import SourceSpec
from schemas.job_file.data_set_use import split_data_set


class LateVersions:
    """Fixes what the gateway left open, once the builds are done after which the job starts.

    Args:
        ended: the record of a build that has ended, by its id.
    """

    def __init__(self, versions: DataSetVersions, ended: Callable[[str], BuildRecord | None]) -> None:
        self._versions = versions
        self._ended = ended

    async def resolve(self, spec: JobSpec, user: str) -> JobSpec:
        """The job with the versions that its builds have made.

        Raises:
            NotFound: a version is not there any more.
            BadJob: the job does not read what the build has made; one line.
        """
        made = [record for name in spec.queue.after if (record := self._ended(name)) is not None]
        versions = {record.spec.name: record.version for record in made if record.version is not None}

        async def fixed(place: str, part: SourceSpec) -> SourceSpec:
            if not part.awaits_data_set:
                return part
            name, _, _ = split_data_set(part.source)
            rows = [row for row in await self._versions.of(name) if row.removed_at is None]
            if name in versions:
                rows = [row for row in rows if row.version == versions[name]]
            if not rows:
                raise NotFound(f"{place}.source: {part.source}: what was built is not there any more")
            manifest = await self._versions.manifest(name, rows[-1].version)
            return read_as(part, rows[-1], manifest, place, user)

        found = {place: await fixed(place, part) for place, part in spec.data.places().items()}
        return with_sources(spec, found)
