"""What runs are compared by: the curve of a job, and the prices of the mesh."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, JobId, answer
from schemas.curve import StepCurve
from schemas.usage import Prices


def runs(context: HttpContext) -> APIRouter:
    """The routes of curves and prices."""
    router = APIRouter(prefix="/v1", tags=["runs"])

    @router.get("/jobs/{job}/curve", response_model=StepCurve)
    async def curve(
        job: JobId,
        bearer: HttpBearer,
        start: Annotated[int, Query(ge=1, le=1 << 62, description="`next` of an earlier answer")] = 1,
        points: Annotated[int, Query(ge=1, le=20_000, description="at most about so many")] = 2_000,
    ) -> Response:
        """A job's losses and other figures by step, so far or since an earlier answer; of ended jobs, too."""
        await bearer.run(context.jobs.read(job))
        return answer(await context.curves.of(job, start, points))

    @router.get("/prices", response_model=Prices)
    async def prices(bearer: HttpBearer) -> Response:
        """What a slot-hour and a kilowatt-hour cost here; null where nobody has said so."""
        await bearer.check("mesh.read", "mesh")
        return answer(context.config.prices)

    return router
