"""Data sets in the bus's object store, and users' archives of code: list, store, fetch and remove them."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import AfterValidator

from bus.logs import get_logger
from bus.messaging.object_store import ObjectInfo
from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import BYTES, DOCUMENTED, File, file_answer
from entities.gateway.http.requests import (
    BoundedBody,
    ByteRange,
    HttpBearer,
    PageAsked,
    answer,
    check_length,
    discard,
)
from entities.gateway.operations.code import archive, may_bring, owner_of_code, with_digest
from entities.gateway.storage.usage import DATASETS
from schemas.errors import Ack, BadInput, NotFound
from schemas.job_file.code import archive_name
from schemas.pages import CodeArchive, CodePage, Dataset, DatasetPage

log = get_logger("door")

FOLDER = DATASETS
URL = f"bus://{FOLDER}"
PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"
_name = re.compile(PATTERN)
_body = {"schema": {"type": "string", "format": "binary"}}
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
_sha256 = re.compile(DIGEST_PATTERN)
UPLOAD = {"requestBody": {"required": True, "content": {BYTES: _body}}}


def _checked(name: str) -> str:
    if not _name.match(name):
        raise BadInput(
            "a dataset's name has 1 to 120 letters, digits, . _ or -, and begins with a letter or digit"
        )
    return name


Name = Annotated[str, Path(json_schema_extra={"pattern": PATTERN}), AfterValidator(_checked)]


def datasets(context: HttpContext) -> APIRouter:
    """The routes below `/v1/datasets`."""
    router = APIRouter(prefix="/v1/datasets", tags=["datasets"])
    objects, uploads = context.bus.objects, context.jobs.stored.uploads

    @router.get("", response_model=DatasetPage)
    async def list_datasets(bearer: HttpBearer, page: PageAsked) -> Response:
        """The stored datasets, by name."""
        await bearer.check("dataset.read", "datasets")
        infos = await objects.list(f"{FOLDER}/")
        return page.of(DatasetPage, map(_dataset, infos), lambda dataset: (f"{FOLDER}/{dataset.name}",))

    @router.put("/{name}", status_code=201, response_model=Dataset, openapi_extra=UPLOAD)
    async def store(name: Name, request: Request, bearer: HttpBearer) -> Response:
        """Store a dataset, in place of one of the same name; a job then names it as `data.source`."""
        access = await bearer.check("dataset.write", name)
        limit = context.config.max_dataset_bytes
        stated_bytes = check_length(request, limit)
        async with uploads.begin(access, name, stated_bytes, context.config.upload_hold_s) as upload:
            body = upload.within(BoundedBody(request, limit).pieces())
            info = await objects.put(f"{FOLDER}/{name}", body, upload.nuid)
            await upload.stored()
        log.info("dataset stored", name=name, bytes=info.size, user=access.user)
        return answer(_dataset(info), 201, {"Location": f"/v1/datasets/{name}"})

    @router.get("/{name}", response_class=File, responses=DOCUMENTED)
    async def load(name: Name, bearer: HttpBearer, byte_range: ByteRange = None) -> Response:
        """The dataset's bytes, or a range of them."""
        await bearer.check("dataset.read", name)
        return await file_answer(context.files(URL), name, byte_range)

    @router.delete("/{name}", response_model=Ack)
    async def delete(name: Name, bearer: HttpBearer) -> Response:
        """Remove a dataset; for operators. A job that is reading it fails."""
        access = await bearer.check("dataset.delete", name)
        if not await objects.delete(f"{FOLDER}/{name}"):
            raise NotFound(f"there is no dataset {name}")
        await uploads.removed(name)
        log.info("dataset removed", name=name, user=access.user)
        return answer(Ack(note=f"{name} removed"))

    return router


def _dataset(info: ObjectInfo) -> Dataset:
    name = info.name.removeprefix(f"{FOLDER}/")
    return Dataset(
        name=name, bytes=info.size, source=f"{URL}/{name}", sha256=info.digest, modified=info.modified
    )


# --- code ---------------------------------------------------------------------------------------------------
def _checked_digest(digest: str) -> str:
    if not _sha256.fullmatch(digest):
        raise BadInput("code is named by the SHA-256 of its archive: 64 digits 0-9 and a-f")
    return digest


Digest = Annotated[str, Path(json_schema_extra={"pattern": DIGEST_PATTERN}), AfterValidator(_checked_digest)]


def code(context: HttpContext) -> APIRouter:
    """The routes below `/v1/code`."""
    router = APIRouter(prefix="/v1/code", tags=["code"])
    objects, uploads, operations = context.bus.objects, context.jobs.stored.uploads, context.jobs.code

    @router.get("", response_model=CodePage)
    async def list_archives(bearer: HttpBearer, page: PageAsked) -> Response:
        """Your archives of code, by their digests."""
        access = await bearer.check("code.read", "code")
        return page.of(CodePage, await operations.each(access.user), lambda item: (item.sha256,))

    @router.get("/{sha256}", response_model=CodeArchive)
    async def show(sha256: Digest, bearer: HttpBearer) -> Response:
        """Whether an archive of yours is stored: then it need not be sent again."""
        return answer(await bearer.run(operations.show(sha256)))

    @router.put("/{sha256}", status_code=201, response_model=CodeArchive, openapi_extra=UPLOAD)
    async def store(sha256: Digest, request: Request, bearer: HttpBearer) -> Response:
        """Store an archive (ZIP) under the SHA-256 of its bytes; a job then names it as `code.sha256`.

        One that is stored is never replaced: its bytes would be the same.
        """
        access = await may_bring(bearer, "code.write", sha256, "code")
        limit = context.config.max_code_bytes
        stated_bytes = check_length(request, limit)
        name = archive_name(owner_of_code(access.user), sha256)
        headers = {"Location": f"/v1/code/{sha256}"}
        try:
            known = await operations.find(access.user, sha256)
        except NotFound:
            pass
        else:
            await discard(request)
            return answer(archive(known), 201, headers)
        async with uploads.begin(access, name, stated_bytes, context.config.upload_hold_s) as upload:
            body = upload.within(with_digest(BoundedBody(request, limit).pieces(), sha256))
            info = await objects.put(name, body, upload.nuid)
        log.info("code stored", sha256=sha256, bytes=info.size, user=access.user)
        return answer(archive(info), 201, headers)

    @router.delete("/{sha256}", response_model=Ack)
    async def delete(sha256: Digest, bearer: HttpBearer) -> Response:
        """Remove an archive of yours that no job needs; one that a job needed goes with the job's end."""
        return answer(await bearer.run(operations.remove(sha256)))

    return router
