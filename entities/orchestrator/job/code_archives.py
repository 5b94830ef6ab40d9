"""Archives of code on the bus: each stays while a job that has not ended refers to it (ADR-0051).

A submission is checked, and an ended job's archive removed, in the same turn: so an archive never goes
between the check and the job that needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from bus.connection import Bus
from bus.logs import get_logger
from schemas.data_set.build_file import DataBuildSpec
from schemas.errors import DmscError, NotFound
from schemas.job import ENDED, JobRecord, JobSpec
from schemas.job_file.code import CODE
from schemas.urls import bus_name

log = get_logger("orchestrator")


class CodeArchives:
    """The archives of this mesh's jobs. Its callers hold the turn of submissions.

    `builds`: the objects' names of archives that builds of data sets need, by build.
    """

    def __init__(self, bus: Bus, builds: Mapping[str, str]) -> None:
        self._bus = bus
        self._builds = builds

    async def require(self, spec: JobSpec | DataBuildSpec) -> None:
        """Checks that the archive of a submitted job or build exists.

        Raises:
            NotFound: it does not, any more; the client uploads it again.
        """
        name = archive_of(spec)
        if not name:
            return
        try:
            await self._bus.objects.info(name)
        except NotFound:
            raise NotFound("code: its archive is not on the bus any more; upload it again") from None

    async def release(self, ended: Iterable[JobSpec | DataBuildSpec], others: Iterable[JobRecord]) -> None:
        """Removes the archives of ended jobs and builds that no other one needs; what fails, a later leader
        does."""
        names = {name for spec in ended if (name := archive_of(spec))}
        names -= {archive_of(record.spec) for record in others if record.state not in ENDED}
        names -= set(self._builds.values())
        for name in sorted(names):
            try:
                if await self._bus.objects.delete(name):
                    log.info("code removed", name=name)
            except DmscError as error:
                log.warning("code not removed", name=name, reason=error.text)

    async def release_left_behind(self, records: Iterable[JobRecord]) -> None:
        """Removes what the leader before did not get to remove."""
        known = tuple(records)
        if not any(archive_of(record.spec) for record in known):
            return
        with contextlib.suppress(DmscError):
            stored = {info.name for info in await self._bus.objects.list(f"{CODE}/")}
            ended = [record.spec for record in known if record.state in ENDED]
            await self.release([spec for spec in ended if archive_of(spec) in stored], known)


def archive_of(spec: JobSpec | DataBuildSpec) -> str:
    """The object's name of a job's or build's archive; empty if it has none."""
    return "" if spec.code is None or spec.code.url is None else bus_name(spec.code.url)
