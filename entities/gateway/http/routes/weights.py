"""The weights of finished jobs: the manifest and its safetensors files."""

from __future__ import annotations

from fastapi import APIRouter, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import DOCUMENTED, File, file_answer
from entities.gateway.http.requests import ByteRange, HttpBearer, JobId, answer
from entities.gateway.operations.job_urls import READ_ARTIFACT
from schemas.errors import NotFound
from schemas.job import JobRecord, WeightsManifest


def weights(context: HttpContext) -> APIRouter:
    """The routes below `/v1/jobs/{job}/weights`."""
    router = APIRouter(prefix="/v1/jobs/{job}/weights", tags=["weights"])

    def manifest_of(record: JobRecord) -> WeightsManifest:
        job = record.job
        if record.weights is None:
            raise NotFound(f"{job} is {record.state} and has no weights; they come when it is done", job=job)
        return record.weights

    @router.get("", response_model=WeightsManifest)
    async def manifest(job: JobId, bearer: HttpBearer) -> Response:
        """Shards, index, and the SHA-256 over all tensors."""
        return answer(manifest_of(await bearer.run(context.jobs.read(job))))

    @router.get("/{shard}", response_class=File, responses=DOCUMENTED)
    async def shard(job: JobId, shard: str, bearer: HttpBearer, byte_range: ByteRange = None) -> Response:
        """One safetensors file, or a range of its bytes."""
        weights = manifest_of(await bearer.run(context.jobs.read(job, READ_ARTIFACT)))
        if shard not in weights.shards:
            raise NotFound(f"{job} has no shard {shard}; it has {', '.join(weights.shards)}", job=job)
        return await file_answer(context.files(weights.url), shard, byte_range)

    return router
