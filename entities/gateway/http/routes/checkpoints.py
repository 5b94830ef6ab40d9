"""Checkpoints of a job: the list, their manifests, and their files."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import DOCUMENTED, File, file_answer
from entities.gateway.http.paging import cut
from entities.gateway.http.requests import (
    ByteRange,
    CheckpointName,
    HttpBearer,
    JobId,
    PageAsked,
    answer,
)
from entities.gateway.operations.job_urls import READ_ARTIFACT
from entities.job_files.checkpoint_catalog import PublishedCheckpoints, read_manifest
from schemas.checkpoint import (
    MANIFEST_NAME,
    CheckpointManifest,
    PublishedCheckpoint,
    checkpoints_url,
)
from schemas.errors import DamagedCheckpoint, NotFound
from schemas.job import JobRecord
from schemas.pages import CheckpointPage


def checkpoints(context: HttpContext) -> APIRouter:
    """The routes below `/v1/jobs/{job}/checkpoints`."""
    router = APIRouter(prefix="/v1/jobs/{job}/checkpoints", tags=["checkpoints"])

    def folder_of(record: JobRecord) -> str:
        return checkpoints_url(record.spec.artifacts, record.job)

    async def manifest_of(url: str, job: str, name: str) -> CheckpointManifest:
        folder = f"{url}/{name}"
        if not await context.files(folder).exists(MANIFEST_NAME):
            raise NotFound(f"{job} has no checkpoint {name}", job=job)
        return await read_manifest(context.files, folder)

    @router.get("", response_model=CheckpointPage)
    async def published(job: JobId, bearer: HttpBearer, page: PageAsked) -> Response:
        """The job's checkpoints that exist, the newest first, each with its manifest."""
        store = PublishedCheckpoints(context.files, folder_of(await bearer.run(context.jobs.read(job))))
        folders = {str(folder): folder for folder in await store.published()}
        names, after = cut(
            folders,
            lambda name: (folders[name].version, folders[name].epoch, folders[name].number),
            page.limit,
            page.cursor,
            descending=True,
        )
        page_items = []
        for name in names:
            url = store.url_of(folders[name])
            with contextlib.suppress(DamagedCheckpoint):  # damaged, or removed meanwhile
                manifest = await read_manifest(context.files, url)
                page_items.append(PublishedCheckpoint(name=name, url=url, manifest=manifest))
        return page.answer(CheckpointPage(checkpoints=tuple(page_items), next=after))

    @router.get("/{name}", response_model=PublishedCheckpoint)
    async def one(job: JobId, name: CheckpointName, bearer: HttpBearer) -> Response:
        """One checkpoint of the job, with its manifest."""
        url = folder_of(await bearer.run(context.jobs.read(job)))
        manifest = await manifest_of(url, job, name)
        return answer(PublishedCheckpoint(name=name, url=f"{url}/{name}", manifest=manifest))

    @router.get("/{name}/{path:path}", response_class=File, responses=DOCUMENTED)
    async def file(
        job: JobId, name: CheckpointName, path: str, bearer: HttpBearer, byte_range: ByteRange = None
    ) -> Response:
        """One file of a checkpoint, or a range of its bytes. `path`: as the manifest names the file."""
        url = folder_of(await bearer.run(context.jobs.read(job, READ_ARTIFACT)))
        if path != MANIFEST_NAME and path not in (await manifest_of(url, job, name)).files:
            raise NotFound(f"checkpoint {name} of {job} has no file {path}", job=job)
        return await file_answer(context.files(f"{url}/{name}"), path, byte_range)

    return router
