"""Requests about data sets that the mesh builds: builds, their events, versions, manifests, files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dmsc.client import http_protocol
from dmsc.client.calls.access_calls import segment
from dmsc.client.calls.code_calls import CodeCalls
from dmsc.client.gateway_requests import OnProgress
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BUILD_ENDED, BuildEvent, BuildRecord, DataSetVersion
from schemas.data_set.manifest import DataSetManifest
from schemas.data_set.units import StoredObject
from schemas.errors import BadJob, NotFound
from schemas.pages import BuildPage, DataSetPage

DataBuild = str | Path | Mapping[str, Any] | DataBuildSpec
"""A build to submit: the path of its file, a mapping, or a `DataBuildSpec`."""


class DataCalls(CodeCalls):
    """A part of `AsyncClient`."""

    # --- builds ---------------------------------------------------------------------------------------------
    async def build(self, build: DataBuild, *, idempotency_key: str | None = None) -> BuildRecord:
        """Begin to build a data set's next version; return the build's record.

        The folder that it names as `code` is uploaded first, unless the mesh has it already.
        """
        document = build_document(build)
        return await self._submit_with_code(BuildRecord, "/v1/data/builds", document, idempotency_key)

    async def builds(self, *, state: str | None = None, name: str | None = None) -> list[BuildRecord]:
        """The mesh's builds of data sets, oldest first."""
        pages = self._gateways.pages("/v1/data/builds", BuildPage, {"state": state, "name": name})
        return [record async for page in pages for record in page.builds]

    async def build_record(self, build: str) -> BuildRecord:
        """One build's record. Raises `NotFound`."""
        return await self._gateways.ask_for(BuildRecord, "GET", f"/v1/data/builds/{segment(build)}")

    async def cancel_build(self, build: str, *, reason: str = "") -> BuildRecord:
        """Cancel a build. The next one of the same file goes on with what it has finished."""
        path = f"/v1/data/builds/{segment(build)}/cancel"
        return await self._gateways.ask_for(BuildRecord, "POST", path, params={"reason": reason})

    async def park_build(self, build: str, *, reason: str = "") -> BuildRecord:
        """Have a build begin no more units until `resume_build`; one that waits is held."""
        path = f"/v1/data/builds/{segment(build)}/park"
        return await self._gateways.ask_for(BuildRecord, "POST", path, params={"reason": reason})

    async def resume_build(self, build: str) -> BuildRecord:
        """Have a parked or held build go on. Raises `Conflict` if it is neither."""
        return await self._gateways.ask_for(BuildRecord, "POST", f"/v1/data/builds/{segment(build)}/resume")

    async def prioritise_build(self, build: str, priority: int) -> BuildRecord:
        """Give a build another class of priority in the queue."""
        path = f"/v1/data/builds/{segment(build)}/prioritise"
        return await self._gateways.ask_for(BuildRecord, "POST", path, params={"priority": priority})

    async def build_events(self, build: str, *, start: int = 1) -> AsyncIterator[BuildEvent]:
        """The events of a build from stream position `start`, then live, until it has ended.

        It reconnects by itself (also to another gateway) and continues; each event comes once.
        """

        async def has_ended() -> bool:
            return (await self.build_record(build)).ended

        path = f"/v1/data/builds/{segment(build)}/events"
        async with aclosing(self._gateways.follow(path, BuildEvent, start, over=has_ended)) as events:
            async for event in events:
                yield event
                if event.kind == "state" and event.state in BUILD_ENDED:
                    return

    async def wait_for_build(self, build: str) -> BuildRecord:
        """Wait until the build has ended; return its last record. One that failed raises nothing."""
        async for _ in self.build_events(build):
            pass
        return await self.build_record(build)

    # --- versions -------------------------------------------------------------------------------------------
    async def data_sets(self, name: str | None = None) -> list[DataSetVersion]:
        """The versions of all data sets that the mesh has built, or of one. Raises `NotFound`."""
        path = "/v1/data/sets" if name is None else f"/v1/data/sets/{segment(name)}"
        pages = self._gateways.pages(path, DataSetPage)
        return [row async for page in pages for row in page.versions]

    async def data_set(self, name: str, version: int | None = None) -> DataSetVersion:
        """One version of a data set; the newest if none is named. Raises `NotFound`."""
        if version is None:
            return (await self.data_sets(name))[-1]
        path = f"/v1/data/sets/{segment(name)}/{version}"
        return await self._gateways.ask_for(DataSetVersion, "GET", path)

    async def data_set_manifest(self, name: str, version: int | None = None) -> DataSetManifest:
        """The manifest of a version. Raises `NotFound`, and `BadJob` if its bytes are not those recorded."""
        row = await self.data_set(name, version)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "manifest.json"
            path = f"/v1/data/sets/{segment(row.name)}/{row.version}/manifest"
            with http_protocol.partial_file(file) as partial:
                await self._gateways.fetch(path, partial, "manifest", None)
            data = await asyncio.to_thread(file.read_bytes)
        if hashlib.sha256(data).hexdigest() != row.manifest_sha256:
            raise BadJob(f"the manifest of {row.reference} was changed since it was built")
        return DataSetManifest.model_validate_json(data)

    async def download_data_set_file(
        self,
        name: str,
        version: int,
        stored: StoredObject,
        file: Path,
        *,
        progress: OnProgress | None = None,
    ) -> Path:
        """Fetch one of a version's files, as its manifest names them."""
        path = f"/v1/data/sets/{segment(name)}/{version}/files/{stored.sha256}"
        with http_protocol.partial_file(file) as partial:
            await self._gateways.fetch(path, partial, stored.sha256[:12], progress)
        return file

    async def check_data_set(
        self, name: str, version: int | None = None, *, on_file: Callable[[str, int, int], None] | None = None
    ) -> tuple[DataSetManifest, list[str]]:
        """Read each file of a version, and compare digests; return the manifest, and a line for each damage.

        `on_file` is called after each file with its digest, and the number of files so far and in all.
        """
        manifest = await self.data_set_manifest(name, version)
        row = await self.data_set(name, manifest.version)
        damages = []
        if manifest.digest != row.digest:
            damages.append(f"manifest: its digest is {manifest.digest}, recorded is {row.digest}")
        files = [
            (f"{split}, file {index}", stored)
            for split, shards in manifest.splits.items()
            for index, shard in enumerate(shards)
            for stored in (shard, shard.index)
        ]
        with TemporaryDirectory() as folder:
            for number, (where, stored) in enumerate(files, 1):
                file = Path(folder) / "file"
                try:
                    await self.download_data_set_file(name, manifest.version, stored, file)
                    digest = await asyncio.to_thread(_sha256, file)
                except NotFound as error:
                    damages.append(f"{where}: {error.text}")
                else:
                    if digest != stored.sha256:
                        damages.append(f"{where}: its SHA-256 is {digest}, not {stored.sha256}")
                finally:
                    file.unlink(missing_ok=True)
                if on_file is not None:
                    on_file(stored.sha256, number, len(files))
        return manifest, damages

    async def delete_data_set(self, name: str, version: int) -> str:
        """Delete a version of a data set of yours. Raises `Conflict` while a job reads it."""
        answer = await self._gateways.ask("DELETE", f"/v1/data/sets/{segment(name)}/{version}")
        return str(answer["note"])


def build_document(build: DataBuild) -> dict[str, Any]:
    """The build as JSON. Raises `BadJob` with a line for each problem."""
    from pydantic import ValidationError

    from dmsc.client.job_file import load_build
    from schemas.explain import explain

    if isinstance(build, str | Path):
        build = load_build(Path(build))
    if not isinstance(build, DataBuildSpec):
        try:
            build = DataBuildSpec.model_validate(build)
        except ValidationError as error:
            raise BadJob("\n".join(explain(error, DataBuildSpec))) from None
    document: dict[str, Any] = build.model_dump(mode="json")
    return document


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
