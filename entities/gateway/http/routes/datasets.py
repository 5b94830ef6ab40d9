"""Data sets in the bus's object store: list, store, fetch and remove them."""

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
)
from entities.gateway.storage.usage import DATASETS
from schemas.errors import Ack, BadInput, NotFound
from schemas.pages import Dataset, DatasetPage

log = get_logger("door")

FOLDER = DATASETS
URL = f"bus://{FOLDER}"
PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"
_name = re.compile(PATTERN)
_body = {"schema": {"type": "string", "format": "binary"}}
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
