"""The dashboard's HTTP: its files, one aggregated view, live events, log search, and the tap.

Files need no token, for nothing of the mesh is in them; all the rest is checked by Type 3, and a stream again
and again while it is open, so that a revoked token ends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from bus.connection import Bus
from bus.tap_scope import left_out
from entities.gateway.dashboard.assets import HEADERS, INDEX, assets
from entities.gateway.dashboard.feed import FeedConfig, LiveFeed
from entities.gateway.dashboard.logs import LogDesk, Search
from entities.gateway.dashboard.tap_stream import TapRooms
from entities.gateway.dashboard.viewers import sse
from entities.gateway.guard import Guard
from entities.gateway.operations import Authorization, bearer, instance_id, job_id
from entities.gateway.tap_desk import TapDesk
from schemas.errors import NotFound, Refused, Unavailable
from schemas.registry import ServiceRecord
from schemas.signals import AccessDecision

PATH = "/dashboard/"
KEEPALIVE_S = 15.0
CHECKED_S = 1.0
"""How often a stream's token is checked again; a remembered yes costs a look into a table."""
_SSE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Dashboard:
    """What the routes share. `close` before the door closes: open streams then end by themselves."""

    def __init__(
        self,
        bus: Bus,
        guard: Guard,
        gateway: str,
        records: Callable[[], Collection[ServiceRecord]],
        config: FeedConfig | None = None,
    ) -> None:
        self.guard = guard
        self.gateway = gateway
        self.feed = LiveFeed(bus, lambda: {record.sid: record for record in records()}, config)
        self.logs = LogDesk(bus)
        self.taps = TapRooms(bus)
        self.scopes = TapDesk(guard)

    async def close(self) -> None:
        await self.feed.close()

    async def may_look(self, token: str) -> AccessDecision:
        """Raises `Refused` where the bearer may not see all that the view has."""
        for action, resource in (("job.list", "jobs"), ("fault.read", "faults")):
            await self.guard.check(token, action, resource)
        return await self.guard.check(token, "mesh.read", "mesh")

    def you(self, access: AccessDecision) -> dict[str, Any]:
        return {"user": access.user, "role": access.role, "gateway": self.gateway}

    async def still(self, token: str, action: str, resource: str) -> None:
        """Raises `Refused` once the bearer may no more. An authorizer that is away changes nothing."""
        with contextlib.suppress(Unavailable):
            await self.guard.check(token, action, resource)

    async def live(self, token: str, access: AccessDecision) -> AsyncGenerator[bytes, None]:
        """The whole picture, then what changes, until the client goes."""
        async with self.feed.viewer() as viewer:
            yield sse("you", self.you(access))
            quiet_since = time.monotonic()
            while not self.feed.closed:
                frame = await viewer.next(CHECKED_S)
                try:
                    await self.still(token, "mesh.read", "mesh")
                except Refused as error:
                    yield sse("refused", {"detail": error.text})
                    return
                now = time.monotonic()
                if frame is not None:
                    quiet_since = now
                    yield frame
                elif now - quiet_since >= KEEPALIVE_S:
                    quiet_since = now
                    yield b": waiting\n\n"


def add_dashboard(app: FastAPI, dashboard: Dashboard) -> None:
    """Adds the routes; `app.state.dashboard` is what has to be closed."""
    app.state.dashboard = dashboard
    _files(app)
    _views(app, dashboard)
    _searches(app, dashboard)


def _files(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return RedirectResponse(PATH, 307)

    @app.get("/dashboard", include_in_schema=False)
    async def bare() -> Response:
        return RedirectResponse(PATH, 307)

    @app.get(f"{PATH}{{path:path}}", include_in_schema=False)
    async def file(path: str, if_none_match: Annotated[str, Header(max_length=200)] = "") -> Response:
        asset = assets().get(path or INDEX)
        if asset is None:
            raise NotFound(f"the dashboard has no file {path!r}; it begins at {PATH}")
        headers = {**HEADERS, "ETag": asset.etag}
        if asset.etag in if_none_match:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.media_type)


def _views(app: FastAPI, dashboard: Dashboard) -> None:
    @app.get("/v1/overview", tags=["dashboard"])
    async def overview(authorization: Authorization = None) -> JSONResponse:
        """All that a page needs, in one call: what `/v1/live` begins with."""
        access = await dashboard.may_look(bearer(authorization))
        whole = await dashboard.feed.whole()
        return JSONResponse({"you": dashboard.you(access), **whole}, headers={"Cache-Control": "no-store"})

    @app.get("/v1/live", tags=["dashboard"])
    async def live(authorization: Authorization = None) -> Response:
        """Server-sent events: `you`, `overview`, then `delta` at most four times a second.

        A client that lags eight deltas behind gets an `overview` in their place.
        """
        token = bearer(authorization)
        access = await dashboard.may_look(token)
        return await _streaming(dashboard.live(token, access))


def _searches(app: FastAPI, dashboard: Dashboard) -> None:
    @app.get("/v1/logs", tags=["dashboard"])
    async def logs(
        authorization: Authorization = None,
        text: Annotated[str, Query(max_length=200, description="part of a line, in any case")] = "",
        level: Annotated[
            Literal["info", "warning", "error", "critical"], Query(description="at least")
        ] = "info",
        sid: Annotated[str | None, Query(max_length=120)] = None,
        job: Annotated[str | None, Query(max_length=120)] = None,
        since_s: Annotated[float, Query(gt=0, le=86_400, description="seconds back from now")] = 900.0,
        start: Annotated[int | None, Query(ge=1, description="from this sequence on, instead")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> JSONResponse:
        """The latest log lines that fit, oldest first; `next` continues where this search ended."""
        await dashboard.guard.check(bearer(authorization), "tap.read", "logs")
        wanted = Search(
            text=text,
            level=level,
            sid=None if sid is None else instance_id(sid),
            job=None if job is None else job_id(job),
            since=time.time() - since_s,
            start=start,
            limit=limit,
        )
        return JSONResponse(await dashboard.logs.search(wanted), headers={"Cache-Control": "no-store"})

    @app.get("/v1/tap", tags=["dashboard"])
    async def tap(
        authorization: Authorization = None,
        subject: Annotated[
            list[str] | None, Query(max_length=16, description="as `dmsc tap` takes it")
        ] = None,
        where: Annotated[list[str] | None, Query(max_length=16, description="field=value")] = None,
        replies: Annotated[bool, Query(description="also the answers to requests")] = False,
    ) -> Response:
        """Server-sent events: `ready`, then `messages` in batches, decoded, secrets as `***`."""
        token = bearer(authorization)
        scope = await dashboard.scopes.scope(token)
        patterns = subject or ["signal.>"]
        left_out(scope, patterns)

        async def still() -> None:
            await dashboard.still(token, "tap.read", "bus")

        return await _streaming(dashboard.taps.stream(patterns, where or [], replies, scope, still))


async def _streaming(frames: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Waits for the first frame, so that what goes wrong until then has a status of its own."""
    first = await anext(frames)

    async def all_of() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(frames):
            yield first
            async for frame in frames:
                yield frame

    return StreamingResponse(all_of(), media_type="text/event-stream", headers=_SSE)
