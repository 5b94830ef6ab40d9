"""The dashboard's routes: its files, one aggregated view, live events, log search, and the tap.

The files need no token, because they contain nothing of the mesh. All else is checked by Type 3; a stream is
checked for as long as it is open (`HttpContext.stream`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from bus.tap.scope import left_out
from entities.gateway.dashboard.assets import HEADERS, INDEX, PATH, assets
from entities.gateway.dashboard.logs import Search
from entities.gateway.dashboard.view_model import PAGE, OverviewPart
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, WantedInstance, WantedJob
from entities.gateway.http.sse.response import STREAM, EventStream
from entities.gateway.operations.access import tap_scope
from entities.gateway.operations.access_client import Bearer
from schemas.errors import NotFound


def dashboard(context: HttpContext) -> APIRouter:
    """The routes of the page's files and of the data that the page shows."""
    router = APIRouter()
    _files(router)
    _views(router, context)
    _searches(router, context)
    return router


def _files(router: APIRouter) -> None:
    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse(PATH, 307)

    @router.get("/dashboard", include_in_schema=False)
    async def dashboard_without_slash() -> Response:
        return RedirectResponse(PATH, 307)

    @router.get(f"{PATH}{{path:path}}", include_in_schema=False)
    async def file(path: str, if_none_match: Annotated[str, Header(max_length=200)] = "") -> Response:
        asset = assets().get(path or INDEX)
        if asset is None:
            raise NotFound(f"the dashboard has no file {path!r}; it begins at {PATH}")
        headers = {**HEADERS, "ETag": asset.etag}
        if asset.etag in if_none_match:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.media_type)


def _views(router: APIRouter, context: HttpContext) -> None:
    service = context.dashboard

    @router.get("/v1/overview", tags=["dashboard"])
    async def overview(
        bearer: HttpBearer,
        part: Annotated[
            list[OverviewPart] | None,
            Query(max_length=24, description="only these parts; the last five come only when they are named"),
        ] = None,
    ) -> JSONResponse:
        """All that a page needs, in one call: the first event of `/v1/live`."""
        parts = part or PAGE
        access = await service.check_access(bearer, parts)
        whole = await service.aggregator.whole(parts)
        return JSONResponse({"you": service.you(access), **whole}, headers={"Cache-Control": "no-store"})

    @router.get("/v1/live", response_class=EventStream, responses=STREAM, tags=["dashboard"])
    async def live(request: Request, bearer: HttpBearer) -> EventStream:
        """Server-sent events: `you`, `overview`, then `delta` at most four times a second.

        A client that lags eight deltas behind gets an `overview` in their place.
        """
        access = await service.check_access(bearer)
        return await _streaming(context, request, bearer, "mesh.read", "mesh", service.live(access))


def _searches(router: APIRouter, context: HttpContext) -> None:
    service = context.dashboard

    @router.get("/v1/logs", tags=["dashboard"])
    async def logs(
        bearer: HttpBearer,
        text: Annotated[str, Query(max_length=200, description="part of a line, in any case")] = "",
        level: Annotated[
            Literal["info", "warning", "error", "critical"], Query(description="at least")
        ] = "info",
        sid: WantedInstance = None,
        job: WantedJob = None,
        since_s: Annotated[float, Query(gt=0, le=86_400, description="seconds back from now")] = 900.0,
        start: Annotated[
            int | None, Query(ge=1, le=1 << 62, description="from this sequence on, instead")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> JSONResponse:
        """The latest log lines that match, oldest first; `next` continues where this search ended."""
        await bearer.check("tap.read", "logs")
        search = Search(
            text=text,
            level=level,
            sid=sid,
            job=job,
            since=time.time() - since_s,
            start=start,
            limit=limit,
        )
        return JSONResponse(await service.logs.search(search), headers={"Cache-Control": "no-store"})

    @router.get("/v1/tap", response_class=EventStream, responses=STREAM, tags=["dashboard"])
    async def tap(
        request: Request,
        bearer: HttpBearer,
        subject: Annotated[
            list[str] | None, Query(max_length=16, description="as `dmsc tap` takes it")
        ] = None,
        where: Annotated[list[str] | None, Query(max_length=16, description="field=value")] = None,
        replies: Annotated[bool, Query(description="also the answers to requests")] = False,
    ) -> EventStream:
        """Server-sent events: `ready`, then `messages` in batches, decoded, secrets as `***`."""
        scope = await tap_scope(bearer)
        patterns = subject or ["signal.>"]
        left_out(scope, patterns)
        frames = service.taps.stream(patterns, where or [], replies, scope, bearer.token)
        return await _streaming(context, request, bearer, "tap.read", "bus", frames)


async def _streaming(
    context: HttpContext,
    request: Request,
    bearer: Bearer,
    action: str,
    resource: str,
    frames: AsyncGenerator[bytes, None],
) -> EventStream:
    """Waits for the first frame, so that an error until then gets a status of its own."""
    first = await anext(frames)

    async def all_frames() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(frames):
            yield first
            async for frame in frames:
                yield frame

    return context.stream(request, bearer, action, resource, all_frames())
