"""Routes about this gateway and the bearer: probes, metrics, scrape targets, and the tap's scope."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import PlainTextResponse

from entities.gateway.http.context import HttpContext
from entities.gateway.http.metrics import scrape_targets
from entities.gateway.http.requests import HttpBearer, answer
from entities.gateway.operations.access import tap_scope
from schemas.errors import NotFound
from schemas.gateway_api import TapScope
from schemas.pages import Health, Readiness, ScrapeTarget


def probes(context: HttpContext) -> APIRouter:
    """`/healthz`, `/readyz`, `/metrics`, `/v1/metrics/targets`, `/v1/tap/scope`."""
    router = APIRouter()
    metrics = context.metrics

    @router.get("/healthz", response_model=Health, tags=["probes"])
    async def healthz() -> Response:
        """Liveness probe. Needs no token."""
        return answer(Health())

    @router.get(
        "/readyz",
        response_model=Readiness,
        responses={503: {"model": Readiness, "description": "not ready, and why"}},
        tags=["probes"],
    )
    async def readyz() -> Response:
        """Readiness probe: whether the bus, a registry and a leading orchestrator are there. No token."""
        readiness = await context.probe.check()
        headers = {"Cache-Control": "no-store"} | ({} if readiness.ready else {"Retry-After": "1"})
        return answer(readiness, 200 if readiness.ready else 503, headers)

    @router.get("/metrics", response_class=PlainTextResponse, tags=["metrics"])
    async def scrape(bearer: HttpBearer, accept: Annotated[str, Header(max_length=1000)] = "") -> Response:
        """This process's metrics in Prometheus' text format."""
        await bearer.check("mesh.read", "metrics")
        render = metrics.render()
        if render is None:
            raise NotFound("this gateway's process tells no metrics")
        body, content_type = await render(accept)
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    @router.get("/v1/metrics/targets", response_model=list[ScrapeTarget], tags=["metrics"])
    async def targets(bearer: HttpBearer) -> list[ScrapeTarget]:
        """Every process of the mesh that exposes metrics, as Prometheus' `http_sd_configs` reads it."""
        await bearer.check("mesh.read", "metrics")
        return scrape_targets(metrics.records())

    @router.get("/v1/tap/scope", response_model=TapScope, tags=["mesh"])
    async def scope(bearer: HttpBearer) -> Response:
        """Which messages of the bus the bearer may tap."""
        return answer(await tap_scope(bearer))

    return router
