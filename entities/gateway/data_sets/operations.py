"""Operations on builds of data sets and on their versions, each checked by Type 3 first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.files.artifacts import open_on_bus
from entities.gateway.operations.access_client import Bearer, check_each
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.job_urls import STORE_LEFT_OUT, among_folders, refuse_each, things_among
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.operation import Operation
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, DataSetVersion
from schemas.data_set.commands import (
    BuildList,
    BuildQuery,
    CancelBuild,
    DataSetList,
    DeleteVersion,
    ParkBuild,
    PrioritiseBuild,
    ResumeBuild,
    SubmitBuild,
)
from schemas.data_set.manifest import DataSetManifest, manifest_url
from schemas.errors import Ack, BadJob, NotFound
from schemas.job_file.data_set_use import SCHEME as DATA_SET
from schemas.job_file.data_set_use import is_data_set
from schemas.signals import AccessDecision, Role
from schemas.urls import BUS, STDLIB, bus_name, is_kept


class DataSetOperations:
    """What clients may ask of builds and data sets. `jobs`: the operations on jobs, beside these."""

    def __init__(self, bus: Bus, backends: Backends, jobs: JobOperations) -> None:
        self._bus = bus
        self._rows = bus.bucket(subjects.DATA_SET_VERSION)
        self._backends = backends
        self._jobs = jobs
        self._query_s, self._command_s = jobs.times.query_s, jobs.times.command_s

    # --- builds ---------------------------------------------------------------------------------------------
    def submit(
        self, bearer: Bearer, spec: DataBuildSpec, *, key: str | None = None
    ) -> Operation[BuildRecord]:
        """Begins a build.

        Raises:
            BadJob: it names what it may not.
            Refused: it names what its user may not read; or the data set is another user's.
            Conflict: a build of the data set is under way.
        """

        async def act(access: AccessDecision) -> BuildRecord:
            refuse_build_urls(spec)
            may_read = await self._let_read(bearer, spec)
            with_code = await self._jobs.code.admit(bearer, spec, access.user)
            if with_code.code is not None and with_code.code.url is not None:
                may_read = (*may_read, with_code.code.url)
            recorded = await self._jobs.secrets.keep_of_build(with_code, access.user)
            await self._jobs.stored.admit_job(access)
            message = SubmitBuild(
                spec=recorded,
                user=access.user,
                quota=access.quota,
                may_read=may_read,
                over_others=access.role in (Role.OPERATOR, Role.ADMIN),
            )
            return await self._backends.command(
                subjects.SUBMIT_BUILD,
                message,
                deadline_s=self._command_s,
                cause=None if key is None else f"key.{key_token(access.user, key)}",
            )

        return Operation("build.submit", spec.name, act)

    async def _let_read(self, bearer: Bearer, spec: DataBuildSpec) -> tuple[str, ...]:
        """The bus URLs that the build reads and its user may read. Raises `Refused`."""
        read = [(key, url) for key, url in spec.urls() if key != "store"]
        jobs = {}
        if among_folders(url for _, url in read):
            jobs = {record.job: record for record in self._jobs.cache.all()}
        things = things_among(read, jobs)
        await check_each(bearer, things)
        return tuple(thing.url for thing in things if bus_name(thing.url))

    def builds(self) -> Operation[BuildList]:
        async def act(_: AccessDecision) -> BuildList:
            return await self._query(None)

        return Operation("build.read", "builds", act)

    def read(self, build: str) -> Operation[BuildRecord]:
        """A build's record. Raises `NotFound`."""

        async def act(_: AccessDecision) -> BuildRecord:
            (record,) = (await self._query(build)).builds
            return record

        return Operation("build.read", build, act)

    async def under_way(self, builds: Iterable[str]) -> set[str]:
        """The data sets that those of these builds make which have not ended."""
        names = set()
        for build in builds:
            with suppress(NotFound):  # the orchestrator says which it does not know
                (record,) = (await self._query(build)).builds
                if not record.ended:
                    names.add(record.spec.name)
        return names

    async def _query(self, build: str | None) -> BuildList:
        question = BuildQuery(build=build)
        return await self._backends.command(subjects.QUERY_BUILDS, question, deadline_s=self._query_s)

    def cancel(self, build: str, reason: str) -> Operation[BuildRecord]:
        def message(access: AccessDecision) -> CancelBuild:
            return CancelBuild(build=build, user=access.user, reason=reason)

        return self._backends.operation(
            "build.cancel", build, subjects.CANCEL_BUILD, message, self._command_s, frees=True
        )

    def park(self, build: str, reason: str) -> Operation[BuildRecord]:
        def message(access: AccessDecision) -> ParkBuild:
            return ParkBuild(build=build, user=access.user, reason=reason)

        return self._backends.operation(
            "build.park", build, subjects.PARK_BUILD, message, self._command_s, frees=True
        )

    def resume(self, build: str) -> Operation[BuildRecord]:
        def message(access: AccessDecision) -> ResumeBuild:
            return ResumeBuild(build=build, user=access.user)

        return self._backends.operation(
            "build.resume", build, subjects.RESUME_BUILD, message, self._command_s
        )

    def prioritise(self, build: str, priority: int) -> Operation[BuildRecord]:
        def message(access: AccessDecision) -> PrioritiseBuild:
            return PrioritiseBuild(build=build, user=access.user, priority=priority)

        return self._backends.operation(
            "build.change", build, subjects.PRIORITISE_BUILD, message, self._command_s
        )

    # --- versions -------------------------------------------------------------------------------------------
    def versions(self, name: str | None) -> Operation[DataSetList]:
        """The versions of one data set, or of all. Raises `NotFound` if there is none of that name."""

        async def act(_: AccessDecision) -> DataSetList:
            rows = await self.rows(name)
            if name is not None and not rows:
                raise NotFound(await self._no_such(name))
            return DataSetList(versions=tuple(rows))

        return Operation("data.read", name or "data", act)

    def version(self, name: str, version: int) -> Operation[DataSetVersion]:
        """One version. Raises `NotFound`."""

        async def act(_: AccessDecision) -> DataSetVersion:
            return await self.find(name, version)

        return Operation("data.read", name, act)

    def delete(self, name: str, version: int) -> Operation[Ack]:
        def message(access: AccessDecision) -> DeleteVersion:
            return DeleteVersion(name=name, version=version, user=access.user)

        return self._backends.operation(
            "data.delete", name, subjects.DELETE_VERSION, message, self._command_s, frees=True
        )

    async def rows(self, name: str | None) -> list[DataSetVersion]:
        """The versions that are there, by name and number."""
        tokens: dict[str, Any] = {} if name is None else {"name": name}
        rows: list[DataSetVersion] = [entry.message for entry in await self._rows.entries(**tokens)]
        there = [row for row in rows if row.removed_at is None]
        return sorted(there, key=lambda row: (row.name, row.version))

    async def find(self, name: str, version: int | None) -> DataSetVersion:
        """One version, the newest if none is named.

        Raises:
            NotFound: there is none; the text says which there are.
        """
        rows = await self.rows(name)
        found = rows if version is None else [row for row in rows if row.version == version]
        if found:
            return found[-1]
        if rows:
            there = ", ".join(str(row.version) for row in rows[-8:])
            raise NotFound(f"there is no data set {name}@{version}; its versions are {there}")
        raise NotFound(await self._no_such(name))

    async def manifest(self, row: DataSetVersion) -> DataSetManifest:
        """A version's manifest. Raises `NotFound`."""
        folder, _, file = manifest_url(row.name, row.version).rpartition("/")
        data = await open_on_bus(folder, self._bus).get_bytes(file)
        return await asyncio.to_thread(DataSetManifest.model_validate_json, data)

    async def _no_such(self, name: str) -> str:
        names = sorted({row.name for row in await self.rows(None)})
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        there = f"there are {', '.join(names[:8])}{more}" if names else "there is none yet: dmsc data build"
        for record in (await self._query(None)).builds:
            if record.spec.name == name and not record.ended:
                there = f"build {record.build} makes it: give queue.after: [{record.build}], or wait"
        return f"there is no data set {name}; {there}"


def refuse_build_urls(spec: DataBuildSpec) -> None:
    """Refuses URLs that a build may not name. Opens nothing.

    Raises:
        BadJob: one of them is not allowed.
    """
    for key, url in spec.urls():
        if is_data_set(url) and key != "store":
            raise BadJob(f"{key}: {url}: a data set is no source of a build; name what it was built from")
        if is_kept(url):
            raise BadJob(
                f"{key}: {url}: a data set would outlive what is kept; name it as data.source of a job"
            )
    store = spec.store
    if store is not None and store.startswith(BUS):
        raise BadJob(f"store: {STORE_LEFT_OUT}")
    if store is not None and (not store or store.startswith((STDLIB, DATA_SET, "http://", "https://"))):
        raise BadJob(
            f"store: {store!r} takes no files; give a folder or an object store's URL, or leave it out"
        )
    refuse_each((key, url, key == "store") for key, url in spec.urls())
