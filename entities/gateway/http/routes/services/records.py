"""Model services: deploy versions, list, share traffic, promote, roll back, shadow, scale, stop."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    HttpBearer,
    IdempotencyKey,
    PageAsked,
    answer,
    body_of,
    named,
    parse,
)
from schemas.base import TOKEN_PATTERN
from schemas.errors import BadInput, BadJob
from schemas.job import JobSpec
from schemas.job_file.parallel import MOST_INSTANCES
from schemas.pages import ServicePage
from schemas.services.model_service import MOST_WHY, ModelService, TrafficBody

ServiceName = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), named("service")]
VersionName = Annotated[str, Query(pattern=TOKEN_PATTERN, max_length=120, description="the version")]
Why = Annotated[str, Query(max_length=MOST_WHY, description="is recorded with the change")]
AnyWhy = Annotated[str, Query(description=f"its first {MOST_WHY} characters are recorded with the change")]
"""A rollback is in a hurry: it is not refused for its reason."""
Expected = Annotated[
    int | None,
    Query(ge=0, lt=1 << 63, description="revision of the record that was seen; of another one: refused"),
]


def services(context: HttpContext) -> APIRouter:
    """The routes below `/v1/services`."""
    router = APIRouter(prefix="/v1/services", tags=["services"])
    operations = context.services

    @router.post("", status_code=201, response_model=ModelService, openapi_extra=body_of(JobSpec))
    async def deploy(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Deploy a version of a service: a JobSpec with `serve`; the service comes to be with its first."""
        text = await context.body(keyed)
        operation = operations.deploy(bearer, parse(JobSpec, text, BadJob), key=keyed.key)
        return await context.command(
            keyed, bearer, operation, text, HTTPStatus.CREATED, lambda made: f"/v1/services/{made.service}"
        )

    @router.get("", response_model=ServicePage)
    async def list_services(bearer: HttpBearer, page: PageAsked) -> Response:
        """The mesh's services by name."""
        found = (await bearer.run(operations.list())).services
        return page.of(ServicePage, found, lambda each: (each.service,))

    @router.get("/{service}", response_model=ModelService)
    async def read(service: ServiceName, bearer: HttpBearer) -> Response:
        """The service: its versions with their states, and the traffic that each gets."""
        (found,) = (await bearer.run(operations.list(service))).services
        return answer(found)

    @router.post("/{service}/traffic", response_model=ModelService, openapi_extra=body_of(TrafficBody))
    async def traffic(service: ServiceName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Share the traffic among versions that are ready: ten-thousandths, 10,000 in all."""
        text = await context.body(keyed)
        body = parse(TrafficBody, text, BadInput)
        return await context.command(keyed, bearer, operations.set_traffic(service, body), text)

    async def order(keyed: Any, bearer: HttpBearer, service: str, action: Any, **more: Any) -> Response:
        return await context.command(keyed, bearer, operations.change(service, action, **more))

    @router.post("/{service}/promote", response_model=ModelService)
    async def promote(
        service: ServiceName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        version: VersionName,
        expected: Expected = None,
        why: Why = "",
    ) -> Response:
        """Give a version all traffic; the former one stays, to be rolled back to."""
        more = {"version": version, "expected": expected, "why": why}
        return await order(keyed, bearer, service, "promote", **more)

    @router.post("/{service}/rollback", response_model=ModelService)
    async def roll_back(
        service: ServiceName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        expected: Expected = None,
        why: AnyWhy = "",
    ) -> Response:
        """Give all traffic back to the stable version."""
        return await order(keyed, bearer, service, "rollback", expected=expected, why=why[:MOST_WHY])

    @router.post("/{service}/shadow", response_model=ModelService)
    async def shadow(
        service: ServiceName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        version: VersionName,
        expected: Expected = None,
        why: Why = "",
    ) -> Response:
        """Have a version answer copies of requests; its answers are thrown away."""
        more = {"version": version, "expected": expected, "why": why}
        return await order(keyed, bearer, service, "shadow", **more)

    @router.post("/{service}/unshadow", response_model=ModelService)
    async def unshadow(
        service: ServiceName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        version: VersionName,
        expected: Expected = None,
        why: Why = "",
    ) -> Response:
        """Have a version answer no copies any more."""
        more = {"version": version, "expected": expected, "why": why}
        return await order(keyed, bearer, service, "unshadow", **more)

    @router.post("/{service}/scale", response_model=ModelService)
    async def scale(
        service: ServiceName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        version: VersionName,
        replicas: Annotated[int, Query(ge=0, le=MOST_INSTANCES, description="0: it gives its slots back")],
        why: Why = "",
    ) -> Response:
        """Set the number of replicas of each stage of a version."""
        more = {"version": version, "replicas": replicas, "why": why}
        return await order(keyed, bearer, service, "scale", **more)

    @router.post("/{service}/stop", response_model=ModelService)
    async def stop(
        service: ServiceName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        version: Annotated[
            str | None,
            Query(pattern=TOKEN_PATTERN, max_length=120, description="default: the service with all of them"),
        ] = None,
        why: Why = "",
    ) -> Response:
        """Stop a version, or the whole service; what they held is free."""
        return await order(keyed, bearer, service, "stop", version=version, why=why)

    return router
