"""The queue of jobs that wait for slots: who is where, and what one of them waits for."""

from __future__ import annotations

from fastapi import APIRouter, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, JobId, answer
from schemas.queue import QueueStatus


def queue(context: HttpContext) -> APIRouter:
    """The routes below `/v1/queue`."""
    router = APIRouter(prefix="/v1/queue", tags=["queue"])

    @router.get("", response_model=QueueStatus)
    async def read(bearer: HttpBearer) -> Response:
        """The waiting jobs in their order, each with its reason."""
        return answer(await bearer.run(context.jobs.queue()))

    @router.get("/{job}", response_model=QueueStatus)
    async def explain(job: JobId, bearer: HttpBearer) -> Response:
        """One waiting job: its place, what blocks it, its expected start, what would change that."""
        return answer(await bearer.run(context.jobs.queue(job)))

    return router
