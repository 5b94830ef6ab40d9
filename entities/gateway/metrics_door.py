"""`/metrics` at the HTTP door, with a token; and where else in the mesh there is something to scrape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Header, Response
from fastapi.responses import JSONResponse

from entities.gateway.guard import Guard
from entities.gateway.operations import Authorization, bearer
from entities.metrics import HTTP_REQUESTS, Reading, Render
from schemas.errors import NotFound
from schemas.registry import InstanceState, ServiceRecord


@dataclass(slots=True)
class DoorMetrics:
    """What the door counts, and what it needs to tell. `render`: None where nobody gave one."""

    gateway: str
    render: Callable[[], Render | None]
    records: Callable[[], Collection[ServiceRecord]]
    answered: Counter[int] = field(default_factory=Counter)

    def readings(self) -> Iterator[Reading]:
        for status, count in self.answered.items():
            yield HTTP_REQUESTS(count, gateway=self.gateway, status=str(status))


def add_metrics(app: FastAPI, guard: Guard, metrics: DoorMetrics) -> None:
    """Adds the routes. Names of jobs and nodes are not for everybody: both need a token."""

    @app.get("/metrics", response_class=Response, tags=["metrics"])
    async def scrape(
        authorization: Authorization = None, accept: Annotated[str, Header(max_length=1000)] = ""
    ) -> Response:
        """This process's metrics in Prometheus' text format."""
        await guard.check(bearer(authorization), "mesh.read", "metrics")
        render = metrics.render()
        if render is None:
            raise NotFound("this gateway's process tells no metrics")
        body, content_type = await render(accept)
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    @app.get("/v1/metrics/targets", tags=["metrics"])
    async def targets(authorization: Authorization = None) -> JSONResponse:
        """Every process of the mesh that tells metrics, as Prometheus' `http_sd_configs` reads it."""
        await guard.check(bearer(authorization), "mesh.read", "metrics")
        return JSONResponse(scrape_targets(metrics.records()))


def scrape_targets(records: Collection[ServiceRecord]) -> list[dict[str, Any]]:
    """One target for each process, however many services are in it (HTTP service discovery's format)."""
    over = (InstanceState.FAULTED, InstanceState.GONE)
    by_url: dict[str, list[ServiceRecord]] = defaultdict(list)
    for record in records:
        if record.endpoint.metrics and record.state not in over:
            by_url[record.endpoint.metrics].append(record)
    return [
        {
            "targets": [urlsplit(url).netloc],
            "labels": {
                "node": there[0].endpoint.node,
                "services": ",".join(sorted(record.sid for record in there)),
            },
        }
        for url, there in sorted(by_url.items())
    ]
