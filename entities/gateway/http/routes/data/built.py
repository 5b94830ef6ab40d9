"""Data sets that the mesh builds: builds below `/v1/data/builds`, their versions below `/v1/data/sets`.

Files that users store themselves are below `/v1/datasets`.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator

from bus import subjects
from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import DOCUMENTED, File, file_answer
from entities.gateway.http.requests import (
    ByteRange,
    FirstEvent,
    HttpBearer,
    IdempotencyKey,
    LastEventId,
    PageAsked,
    Reason,
    answer,
    body_of,
    named,
    parse,
)
from entities.gateway.http.sse.format import build_line, first_sequence
from entities.gateway.http.sse.response import STREAM, EventStream
from schemas.base import TOKEN_PATTERN
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, BuildState, DataSetVersion
from schemas.data_set.manifest import manifest_url
from schemas.errors import Ack, BadJob, NotFound
from schemas.job_file.queue import Priority
from schemas.pages import BuildPage, DataSetPage

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"


def _matching(pattern: str, what: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise NotFound(f"there is no such {what}")
        return text

    return AfterValidator(check)


BuildId = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), named("build")]
DataSet = Annotated[
    str, Path(json_schema_extra={"pattern": NAME_PATTERN}), _matching(NAME_PATTERN, "data set")
]
Version = Annotated[int, Path(ge=1, lt=1 << 31)]
FileDigest = Annotated[
    str, Path(json_schema_extra={"pattern": DIGEST_PATTERN}), _matching(DIGEST_PATTERN, "file")
]


def builds(context: HttpContext) -> APIRouter:
    """The routes below `/v1/data/builds`."""
    router = APIRouter(prefix="/v1/data/builds", tags=["data builds"])
    operations = context.data_sets

    @router.post("", status_code=201, response_model=BuildRecord, openapi_extra=body_of(DataBuildSpec))
    async def submit_build(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Build a data set's next version: a DataBuildSpec as JSON."""
        text = await context.body(keyed)
        spec = parse(DataBuildSpec, text, BadJob)
        operation = operations.submit(bearer, spec, key=keyed.key)
        return await context.command(
            keyed,
            bearer,
            operation,
            text,
            HTTPStatus.CREATED,
            lambda record: f"/v1/data/builds/{record.build}",
        )

    @router.get("", response_model=BuildPage)
    async def list_builds(
        bearer: HttpBearer,
        page: PageAsked,
        state: Annotated[BuildState | None, Query(description="only builds in this state")] = None,
        name: Annotated[str | None, Query(max_length=64, description="only of this data set")] = None,
    ) -> Response:
        """The mesh's builds in the order of their submission."""
        found = (await bearer.run(operations.builds())).builds
        matches = [
            record for record in found if state in (None, record.state) and name in (None, record.spec.name)
        ]
        return page.of(BuildPage, matches, lambda record: (record.submitted_at, record.build))

    @router.get("/{build}", response_model=BuildRecord)
    async def read_build(build: BuildId, bearer: HttpBearer) -> Response:
        """The build's record: units by phase, rows kept and dropped by reason, pace, and the time left."""
        return answer(await bearer.run(operations.read(build)))

    @router.post("/{build}/cancel", response_model=BuildRecord)
    async def cancel_build(
        build: BuildId, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Cancel a build; the next one of the same file goes on with what it has finished."""
        return await context.command(keyed, bearer, operations.cancel(build, reason or "asked for over HTTP"))

    @router.post("/{build}/park", response_model=BuildRecord)
    async def park_build(
        build: BuildId, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Park a build: units that it has begun end, and no other begins until it is resumed."""
        return await context.command(keyed, bearer, operations.park(build, reason))

    @router.post("/{build}/resume", response_model=BuildRecord)
    async def resume_build(build: BuildId, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Resume a build that was parked or held, as soon as there are lanes."""
        return await context.command(keyed, bearer, operations.resume(build))

    @router.post("/{build}/prioritise", response_model=BuildRecord)
    async def prioritise_build(
        build: BuildId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        priority: Annotated[Priority, Query()],
    ) -> Response:
        """Give a build another class of priority; it takes its new place in the queue at once."""
        return await context.command(keyed, bearer, operations.prioritise(build, priority))

    @router.get("/{build}/events", response_class=EventStream, responses=STREAM)
    async def build_events(
        build: BuildId,
        request: Request,
        bearer: HttpBearer,
        start: FirstEvent = None,
        last_event_id: LastEventId = None,
    ) -> EventStream:
        """Server-sent events: those so far, then each new one until the build has ended."""
        record = await bearer.run(operations.read(build))
        records = context.hub.follow(
            subjects.BUILD_EVENT,
            {"build": build},
            build_line,
            first_sequence(start, last_event_id),
            lambda: record.ended,
        )
        return context.stream(request, bearer, "build.read", build, records)

    return router


def data_sets(context: HttpContext) -> APIRouter:
    """The routes below `/v1/data/sets`."""
    router = APIRouter(prefix="/v1/data/sets", tags=["data sets"])
    operations = context.data_sets

    @router.get("", response_model=DataSetPage)
    async def list_data_sets(bearer: HttpBearer, page: PageAsked) -> Response:
        """All versions of all data sets, by name and number."""
        rows = (await bearer.run(operations.versions(None))).versions
        return page.of(DataSetPage, rows, lambda row: (row.name, row.version))

    @router.get("/{name}", response_model=DataSetPage)
    async def list_versions(name: DataSet, bearer: HttpBearer, page: PageAsked) -> Response:
        """The versions of one data set, by number."""
        rows = (await bearer.run(operations.versions(name))).versions
        return page.of(DataSetPage, rows, lambda row: (row.name, row.version))

    @router.get("/{name}/{version}", response_model=DataSetVersion)
    async def read_version(name: DataSet, version: Version, bearer: HttpBearer) -> Response:
        """One version: its digest, what it holds, and what was dropped and why."""
        return answer(await bearer.run(operations.version(name, version)))

    @router.get("/{name}/{version}/manifest", response_class=File, responses=DOCUMENTED)
    async def manifest(
        name: DataSet, version: Version, bearer: HttpBearer, byte_range: ByteRange = None
    ) -> Response:
        """The version's manifest as JSON: each file with its digest, sources, tokenizer, steps' digest."""
        await bearer.run(operations.version(name, version))
        folder, _, file = manifest_url(name, version).rpartition("/")
        return await file_answer(context.files(folder), file, byte_range)

    @router.get("/{name}/{version}/files/{sha256}", response_class=File, responses=DOCUMENTED)
    async def data_set_file(
        name: DataSet,
        version: Version,
        sha256: FileDigest,
        bearer: HttpBearer,
        byte_range: ByteRange = None,
    ) -> Response:
        """One of the version's files, or a range of its bytes."""
        row = await bearer.run(operations.version(name, version))
        return await file_answer(context.files(row.store), f"{sha256[:2]}/{sha256}", byte_range)

    @router.delete("/{name}/{version}", response_model=Ack)
    async def delete_version(name: DataSet, version: Version, bearer: HttpBearer) -> Response:
        """Delete a version of your own; refused while a job reads it. Its number is not given again."""
        return answer(await bearer.run(operations.delete(name, version)))

    return router
