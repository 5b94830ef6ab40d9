"""Models and their versions: below `/v1/registry/models`, and files on their way: `/v1/registry/files`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from bus.logs import get_logger
from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import DOCUMENTED, File, file_answer
from entities.gateway.http.requests import (
    BoundedBody,
    ByteRange,
    HttpBearer,
    IdempotencyKey,
    PageAsked,
    answer,
    body_of,
    check_length,
    discard,
    parse,
)
from entities.gateway.http.routes.datasets import UPLOAD, Digest
from entities.gateway.http.routes.models.parts import PREFIX, Model, Reference
from entities.gateway.models.operations import USE, upload_folder
from schemas.errors import Ack, BadInput, NotFound
from schemas.model_pages import (
    EvaluateBody,
    ModelLine,
    ModelPage,
    RegisterBody,
    StoredModelFile,
    VersionPage,
)
from schemas.models.commands import ModelRegistered
from schemas.models.version import ModelVersion
from schemas.urls import BUS
from schemas.weights_digest import BESIDE, INDEX_NAME

log = get_logger("door")
FileName = Annotated[str, Path(max_length=200, json_schema_extra={"pattern": r"^[\w.-]+$"})]
Note = Annotated[str, Query(max_length=1024, description="is recorded with the approval")]


def models(context: HttpContext) -> APIRouter:
    """The routes below `/v1/registry/models`."""
    router = APIRouter(prefix=f"{PREFIX}/models", tags=["models"])
    operations = context.models

    @router.get("", response_model=ModelPage)
    async def list_models(bearer: HttpBearer, page: PageAsked) -> Response:
        """The models by name: their newest versions, and what their aliases name."""
        found = await bearer.run(operations.models())
        return page.of(ModelPage, found, lambda model: (model.name,))

    @router.get("/{name}", response_model=VersionPage)
    async def list_versions(
        name: Model,
        bearer: HttpBearer,
        page: PageAsked,
        removed: Annotated[bool, Query(description="removed ones, too")] = False,
        newest: Annotated[bool, Query(description="the newest ones first")] = False,
    ) -> Response:
        """A model's versions by number."""
        found = await bearer.run(operations.versions(name, removed))
        return page.of(VersionPage, found, lambda version: (version.version,), descending=newest)

    @router.post(
        "/{name}/versions",
        status_code=201,
        response_model=ModelRegistered,
        openapi_extra=body_of(RegisterBody),
    )
    async def register(name: Model, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Make a version of a finished job's weights, or of a folder's; weights that are one already give it.

        The answer comes when all bytes were read and compared with their digest.
        """
        text = await context.body(keyed)
        operation = operations.register(bearer, name, parse(RegisterBody, text, BadInput), keyed.key)
        return await context.command(
            keyed,
            bearer,
            operation,
            text,
            HTTPStatus.CREATED,
            lambda made: f"{PREFIX}/models/{name}/versions/{made.version.version}",
        )

    @router.get("/{name}/versions/{version}", response_model=ModelVersion)
    async def read_version(name: Model, version: Reference, bearer: HttpBearer) -> Response:
        """One version: digest, files, signature, tokenizer, lineage, evaluations, cost, approvals."""
        return answer(await bearer.run(operations.version(name, version)))

    @router.get("/{name}/versions/{version}/lineage", response_model=ModelLine)
    async def lineage(name: Model, version: Reference, bearer: HttpBearer) -> Response:
        """The version and those that it descends from, the nearest first."""
        return answer(await bearer.run(operations.line(name, version)))

    @router.get("/{name}/versions/{version}/files/{file}", response_class=File, responses=DOCUMENTED)
    async def version_file(
        name: Model, version: Reference, file: FileName, bearer: HttpBearer, byte_range: ByteRange = None
    ) -> Response:
        """One of the version's files, or a range of its bytes."""
        found = await bearer.run(operations.version(name, version, USE))
        if file not in (each.name for each in found.files):
            there = ", ".join(each.name for each in found.files[:8])
            raise NotFound(f"{found.reference} has no file {file}; it has {there}")
        return await file_answer(context.files(found.store), file, byte_range)

    @router.post("/{name}/versions/{version}/approve", response_model=ModelVersion)
    async def approve(
        name: Model, version: Reference, bearer: HttpBearer, keyed: IdempotencyKey, note: Note = ""
    ) -> Response:
        """Approve a version; approvals of who registered it do not count."""
        return await context.command(keyed, bearer, operations.approve(name, version, note))

    @router.post(
        "/{name}/versions/{version}/evaluations",
        response_model=ModelVersion,
        openapi_extra=body_of(EvaluateBody),
    )
    async def evaluate(
        name: Model, version: Reference, bearer: HttpBearer, keyed: IdempotencyKey
    ) -> Response:
        """Record figures of a version; yours of the same metric and data are replaced."""
        text = await context.body(keyed)
        operation = operations.evaluate(name, version, parse(EvaluateBody, text, BadInput))
        return await context.command(keyed, bearer, operation, text)

    @router.delete("/{name}/versions/{version}", response_model=Ack)
    async def remove(name: Model, version: Reference, bearer: HttpBearer) -> Response:
        """Remove a version that no alias names. Its record and its number stay."""
        return answer(await bearer.run(operations.remove(name, version)))

    return router


def model_files(context: HttpContext) -> APIRouter:
    """The routes below `/v1/registry/files`."""
    router = APIRouter(prefix=f"{PREFIX}/files", tags=["models"])
    objects, uploads = context.bus.objects, context.jobs.stored.uploads

    @router.put("/{sha256}/{file}", status_code=201, response_model=StoredModelFile, openapi_extra=UPLOAD)
    async def store(sha256: Digest, file: FileName, request: Request, bearer: HttpBearer) -> Response:
        """Store a file of weights with this digest, to register them then; those of a version stay."""
        if not (file.endswith(".safetensors") or file in BESIDE or file == INDEX_NAME):
            raise BadInput(f"{file}: safetensors, their index, and {', '.join(sorted(BESIDE))} are stored")
        access = await bearer.check("model.upload", sha256)
        folder = f"{upload_folder(access.user)}/{sha256}"
        name = f"{folder.removeprefix(BUS)}/{file}"
        limit = context.config.max_dataset_bytes
        stated_bytes = check_length(request, limit)
        if (await context.models.index()).is_in_use(folder):
            await discard(request)
            info = await objects.info(name)
            return answer(StoredModelFile(store=folder, name=file, bytes=info.size), HTTPStatus.CREATED)
        async with uploads.begin(access, name, stated_bytes, context.config.upload_hold_s) as upload:
            info = await objects.put(name, upload.within(BoundedBody(request, limit).pieces()), upload.nuid)
        log.info("weights stored", sha256=sha256, file=file, bytes=info.size, user=access.user)
        return answer(StoredModelFile(store=folder, name=file, bytes=info.size), HTTPStatus.CREATED)

    return router
