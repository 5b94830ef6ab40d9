"""Clusters and instances, from this gateway's copy of the registry, and the routers' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from bus import subjects
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    ClusterName,
    HttpBearer,
    InstanceId,
    PageAsked,
    WantedJob,
    answer,
)
from entities.gateway.operations.access_client import Bearer
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind
from schemas.errors import NotFound, Unavailable
from schemas.pages import ClusterPage, ClusterView, InstancePage, RoutePage
from schemas.registry import InstanceState, ServiceRecord

Name = Annotated[str | None, Query(max_length=120)]


def registry(context: HttpContext) -> APIRouter:
    """`/v1/clusters`, `/v1/instances`, `/v1/routes`."""
    router = APIRouter(prefix="/v1")

    async def checked_records(bearer: Bearer, resource: str) -> Iterable[ServiceRecord]:
        await bearer.check("mesh.read", resource)
        if not context.follower.informed:
            raise Unavailable("no service registry has been heard of yet; come back in a second")
        return context.records.values()

    @router.get("/clusters", response_model=ClusterPage, tags=["clusters"])
    async def clusters(bearer: HttpBearer, page: PageAsked) -> Response:
        """Each cluster's services, nodes and jobs, and its instances by state."""
        views = cluster_views(await checked_records(bearer, "clusters"))
        return page.of(ClusterPage, views, lambda view: (view.cluster,))

    @router.get("/clusters/{cluster}", response_model=ClusterView, tags=["clusters"])
    async def cluster(cluster: ClusterName, bearer: HttpBearer) -> Response:
        """One cluster."""
        for view in cluster_views(await checked_records(bearer, "clusters")):
            if view.cluster == cluster:
                return answer(view)
        raise NotFound(f"there is no cluster {cluster}; GET /v1/clusters lists them")

    @router.get("/instances", response_model=InstancePage, tags=["instances"])
    async def instances(
        bearer: HttpBearer,
        page: PageAsked,
        job: WantedJob = None,
        cluster: Name = None,
        stage: Annotated[
            int | None, Query(ge=-100, le=100_000, description="below 0: what makes batches")
        ] = None,
        state: InstanceState | None = None,
    ) -> Response:
        """The microservice instances of all jobs."""
        matches = [
            record
            for record in await checked_records(bearer, "instances")
            if record.job is not None
            and job in (None, record.job)
            and cluster in (None, record.endpoint.cluster)
            and stage in (None, record.stage)
            and state in (None, record.state)
        ]
        return page.of(InstancePage, matches, lambda record: (record.sid,))

    @router.get("/instances/{sid}", response_model=ServiceRecord, tags=["instances"])
    async def instance(sid: InstanceId, bearer: HttpBearer) -> Response:
        """The registry's record of one instance or service."""
        await checked_records(bearer, "instances")
        record = context.records.get(sid)
        if record is None:
            raise NotFound(f"the registry knows no {sid}")
        return answer(record)

    @router.get("/routes", response_model=RoutePage, tags=["routes"])
    async def routes(
        bearer: HttpBearer, page: PageAsked, job: WantedJob = None, cluster: Name = None
    ) -> Response:
        """The routers' tables: weighted next hops of each stage, for the senders of each cluster."""
        await bearer.check("mesh.read", "routes")
        tokens: dict[str, Any] = {} if job is None else {"job": job}
        entries = await context.bus.bucket(subjects.ROUTE_TABLE).entries(**tokens)
        tables = [entry.message for entry in entries if isinstance(entry.message, RouteTable)]
        matches = [table for table in tables if cluster in (None, table.cluster, *table.guests)]
        return page.of(RoutePage, matches, lambda table: (table.job, table.cluster, table.stage))

    return router


def cluster_views(records: Iterable[ServiceRecord]) -> list[ClusterView]:
    """One view per cluster that an instance, a node agent, a gateway or a router names as its own."""
    by_cluster: dict[str, list[ServiceRecord]] = {}
    for record in records:
        belongs = record.job is not None or record.kind in (
            EntityKind.CLUSTER,
            EntityKind.GATEWAY,
            EntityKind.ROUTER,
        )
        if belongs:
            by_cluster.setdefault(record.endpoint.cluster, []).append(record)
    return [_view(cluster, members) for cluster, members in sorted(by_cluster.items())]


def _view(cluster: str, records: list[ServiceRecord]) -> ClusterView:
    instances = [record for record in records if record.job is not None]
    services = [record for record in records if record.job is None]
    return ClusterView(
        cluster=cluster,
        nodes=tuple(sorted(record.sid for record in services if record.kind is EntityKind.CLUSTER)),
        services=tuple(sorted(record.sid for record in services if record.kind is not EntityKind.CLUSTER)),
        instances=dict(Counter(str(record.state) for record in instances)),
        jobs=tuple(sorted({record.job for record in instances if record.job is not None})),
    )
