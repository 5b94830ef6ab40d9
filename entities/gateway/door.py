"""The outer door's HTTP (draft §3 MG, "unified entry point"): FastAPI over the desk, artifacts and events.

Errors are `application/problem+json` with one line that names the place and the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bus.artifacts import open_artifacts
from bus.connection import Bus
from bus.logs import get_logger
from entities.checkpoint_store import CheckpointStore, checkpoints_url, read_manifest
from entities.gateway.dashboard import Dashboard, add_dashboard
from entities.gateway.desk import Desk
from entities.gateway.events import EventsConfig, first_sequence, job_events
from entities.gateway.metrics_door import DoorMetrics, add_metrics
from entities.gateway.operations import Authorization, add_operations, bearer, instance_id, job_id
from entities.gateway.policy_routes import add_policies
from entities.gateway.problems import MEDIA_TYPE, TooLarge, problem, status_of
from entities.gateway.promotions import PromotionDesk, add_promotions
from entities.gateway.ranges import parse_range
from entities.gateway.tap_desk import TapDesk, add_tap
from schemas.base import Part, is_token
from schemas.checkpoint import MANIFEST_NAME, CheckpointList, PublishedCheckpoint
from schemas.door import JobList, JobLoad, MeshStatus
from schemas.errors import Ack, BadInput, BadJob, DamagedCheckpoint, DmscError, NotFound
from schemas.explain import explain
from schemas.job import ENDED, JobRecord, JobSpec, WeightsManifest

log = get_logger("door")

DATASETS_URL = "bus://datasets"
DISCARDED_BYTES = 4 << 20
DISCARD_S = 1.0
"""How much of a body above the limit is still read, and for how long, so that the answer arrives."""
_DATASET = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")
_BYTES = "application/octet-stream"


@dataclass(frozen=True, kw_only=True)
class DoorConfig:
    """Bounds of the HTTP door."""

    max_job_bytes: int = 1 << 20  # a job specification; the bus takes no larger message either
    max_dataset_bytes: int = 4 << 30  # one dataset, streamed into the bus's object store
    events: EventsConfig = field(default_factory=EventsConfig)


def build_app(bus: Bus, desk: Desk, metrics: DoorMetrics, config: DoorConfig) -> FastAPI:
    """The application; all state is in what it is given."""
    app = FastAPI(
        title="DMSC gateway", version="1", docs_url="/docs", redoc_url=None, openapi_url="/v1/openapi.json"
    )
    app.add_middleware(RequestLog, metrics=metrics)
    _explain_errors(app)
    _jobs(app, desk, config)
    _events(app, bus, desk, config)
    add_operations(app, bus, desk, config.events)
    add_promotions(app, PromotionDesk(bus, desk.guard))
    add_tap(app, TapDesk(desk.guard))
    add_policies(app, desk.modules, lambda request: _body(request, config.max_job_bytes))
    add_metrics(app, desk.guard, metrics)
    add_dashboard(app, Dashboard(bus, desk.guard, metrics.gateway, metrics.records))
    _weights(app, bus, desk)
    _checkpoints(app, bus, desk)
    _datasets(app, bus, desk, config)

    @app.get("/healthz", tags=["mesh"])
    async def healthz() -> dict[str, str]:
        """Alive. Needs no token and tells nothing."""
        return {"status": "ok"}

    @app.get("/v1/mesh", response_model=MeshStatus, tags=["mesh"])
    async def mesh(authorization: Authorization = None) -> Response:
        return _json(await desk.mesh(bearer(authorization)))

    return app


def _jobs(app: FastAPI, desk: Desk, config: DoorConfig) -> None:
    body = {"required": True, "content": {"application/json": {"schema": JobSpec.model_json_schema()}}}

    @app.post(
        "/v1/jobs",
        status_code=201,
        response_model=JobRecord,
        tags=["jobs"],
        openapi_extra={"requestBody": body},
    )
    async def submit(request: Request, authorization: Authorization = None) -> Response:
        """Submit a job: a JobSpec as JSON."""
        token = bearer(authorization)
        text = await _body(request, config.max_job_bytes)
        try:
            spec = JobSpec.model_validate_json(text)
        except ValidationError as error:
            lines = explain(error, JobSpec)
            raise BadJob(lines[0], problems="\n".join(lines)) from None
        record = await desk.submit(token, spec)
        return _json(record, HTTPStatus.CREATED, {"Location": f"/v1/jobs/{record.job}"})

    @app.get("/v1/jobs", response_model=JobList, tags=["jobs"])
    async def jobs(authorization: Authorization = None) -> Response:
        return _json(await desk.list(bearer(authorization)))

    @app.get("/v1/jobs/{job}", response_model=JobRecord, tags=["jobs"])
    async def read(job: str, authorization: Authorization = None) -> Response:
        return _json(await desk.read(bearer(authorization), job_id(job)))

    @app.get("/v1/jobs/{job}/load", response_model=JobLoad, tags=["jobs"])
    async def load(job: str, authorization: Authorization = None) -> Response:
        """Queue, service time and latency of each of its instances at this moment."""
        return _json(await desk.load(bearer(authorization), job_id(job)))

    @app.post("/v1/jobs/{job}/scale", response_model=Ack, tags=["jobs"])
    async def scale(
        job: str,
        replicas: Annotated[int, Query(ge=1)],
        stage: int | None = None,
        authorization: Authorization = None,
    ) -> Response:
        """More or fewer working replicas of one stage, or of all: joined and left between steps."""
        return _json(await desk.scale(bearer(authorization), job_id(job), replicas, stage))

    @app.post("/v1/jobs/{job}/move", response_model=Ack, tags=["jobs"])
    async def move(
        job: str,
        sid: Annotated[str, Query(max_length=200)],
        stage: Annotated[int, Query(ge=0)],
        authorization: Authorization = None,
    ) -> Response:
        """Have an instance leave its stage at the end of the step; its slot hosts one of `stage` instead."""
        return _json(await desk.change_stage(bearer(authorization), job_id(job), instance_id(sid), stage))

    @app.post("/v1/jobs/{job}/cancel", response_model=JobRecord, tags=["jobs"])
    async def cancel(
        job: str, authorization: Authorization = None, reason: Annotated[str, Query(max_length=200)] = ""
    ) -> Response:
        """End a job: one's own, or any for operators."""
        return _json(await desk.cancel(bearer(authorization), job_id(job), reason or "asked for over HTTP"))


def _events(app: FastAPI, bus: Bus, desk: Desk, config: DoorConfig) -> None:
    @app.get("/v1/jobs/{job}/events", tags=["jobs"])
    async def events(
        job: str,
        authorization: Authorization = None,
        start: Annotated[int | None, Query(ge=1, description="first sequence; default: all")] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Server-sent events: replayed, then followed until the job ended."""
        await desk.read(bearer(authorization), job_id(job))

        async def has_ended() -> bool:
            try:
                return (await desk.look(job)).state in ENDED
            except NotFound:
                return True
            except DmscError:
                return False  # the orchestrator is away: the stream goes on

        first = first_sequence(start, last_event_id)
        return StreamingResponse(
            job_events(bus, job, first, has_ended, config.events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )


def _weights(app: FastAPI, bus: Bus, desk: Desk) -> None:
    async def manifest_of(authorization: str | None, job: str) -> WeightsManifest:
        record = await desk.read(bearer(authorization), job_id(job))
        if record.weights is None:
            raise NotFound(f"{job} is {record.state} and has no weights; they come when it is done", job=job)
        return record.weights

    @app.get("/v1/jobs/{job}/weights", response_model=WeightsManifest, tags=["weights"])
    async def manifest(job: str, authorization: Authorization = None) -> Response:
        """Shards, index, and the SHA-256 over all tensors."""
        return _json(await manifest_of(authorization, job))

    @app.get("/v1/jobs/{job}/weights/{shard}", response_class=Response, tags=["weights"])
    async def shard(
        job: str,
        shard: str,
        authorization: Authorization = None,
        byte_range: Annotated[str | None, Header(alias="Range")] = None,
    ) -> Response:
        """One safetensors file, or a range of its bytes."""
        weights = await manifest_of(authorization, job)
        if shard not in weights.shards:
            raise NotFound(f"{job} has no shard {shard}; it has {', '.join(weights.shards)}", job=job)
        return await _file(bus, weights.url, shard, byte_range)


def _checkpoints(app: FastAPI, bus: Bus, desk: Desk) -> None:
    @app.get("/v1/jobs/{job}/checkpoints", response_model=CheckpointList, tags=["checkpoints"])
    async def published(job: str, authorization: Authorization = None) -> Response:
        """The job's checkpoints that exist, the newest first, each with its manifest."""
        record = await desk.read(bearer(authorization), job_id(job))
        store = CheckpointStore(bus, checkpoints_url(record.spec.artifacts, job))
        found = []
        for folder in await store.published():
            with contextlib.suppress(DamagedCheckpoint):  # or removed meanwhile
                manifest = await read_manifest(bus, store.url_of(folder))
                found.append(
                    PublishedCheckpoint(name=str(folder), url=store.url_of(folder), manifest=manifest)
                )
        return _json(CheckpointList(checkpoints=tuple(found)))

    @app.get("/v1/jobs/{job}/checkpoints/{name}/{path:path}", response_class=Response, tags=["checkpoints"])
    async def file(
        job: str,
        name: str,
        path: str,
        authorization: Authorization = None,
        byte_range: Annotated[str | None, Header(alias="Range")] = None,
    ) -> Response:
        """One file of a checkpoint, or a range of its bytes; `path` as its manifest names it."""
        record = await desk.read(bearer(authorization), job_id(job))
        if not is_token(name):
            raise NotFound(f"{job} has no checkpoint of that name", job=job)
        url = f"{checkpoints_url(record.spec.artifacts, job)}/{name}"
        if path != MANIFEST_NAME and path not in (await read_manifest(bus, url)).files:
            raise NotFound(f"checkpoint {name} of {job} has no file {path}", job=job)
        return await _file(bus, url, path, byte_range)


def _datasets(app: FastAPI, bus: Bus, desk: Desk, config: DoorConfig) -> None:
    @app.put("/v1/datasets/{name}", status_code=201, tags=["datasets"])
    async def store(name: str, request: Request, authorization: Authorization = None) -> JSONResponse:
        """Store a dataset; a job then names it as `data.source`."""
        await desk.guard.check(bearer(authorization), "dataset.write", _dataset(name))
        limit = config.max_dataset_bytes
        if int(request.headers.get("content-length") or 0) > limit:
            raise _too_large(limit)
        counted = _Counted(request, limit)
        await bus.objects.put(f"datasets/{name}", counted.pieces())
        url = f"{DATASETS_URL}/{name}"
        log.info("dataset stored", name=name, bytes=counted.bytes)
        return JSONResponse({"name": name, "bytes": counted.bytes, "source": url}, status_code=201)

    @app.get("/v1/datasets/{name}", response_class=Response, tags=["datasets"])
    async def load(
        name: str,
        authorization: Authorization = None,
        byte_range: Annotated[str | None, Header(alias="Range")] = None,
    ) -> Response:
        await desk.guard.check(bearer(authorization), "dataset.read", _dataset(name))
        return await _file(bus, DATASETS_URL, name, byte_range)


async def _file(bus: Bus, url: str, name: str, byte_range: str | None) -> Response:
    artifacts = open_artifacts(url, bus)
    size = await artifacts.size(name)
    headers = {"Accept-Ranges": "bytes"}
    wanted = parse_range(byte_range, size)
    start, length = wanted or (0, size)
    headers["Content-Length"] = str(length)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
    status = HTTPStatus.OK if wanted is None else HTTPStatus.PARTIAL_CONTENT
    pieces = artifacts.open_range(name, start, length)
    return StreamingResponse(pieces, status_code=int(status), media_type=_BYTES, headers=headers)


class _Counted:
    """A request's body in pieces, refused above a limit. What was stored so far is then not published."""

    def __init__(self, request: Request, limit: int) -> None:
        self._request = request
        self._limit = limit
        self.bytes = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._request.stream():
            self.bytes += len(piece)
            if self.bytes > self._limit:
                raise _too_large(self._limit)
            if piece:
                yield piece


async def _body(request: Request, limit: int) -> bytes:
    if int(request.headers.get("content-length") or 0) > limit:
        raise _too_large(limit)
    return b"".join([piece async for piece in _Counted(request, limit).pieces()])


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is above this door's limit of {limit} bytes")


async def _discard(request: Request) -> None:
    """Read a little of what is still being sent: a hang-up at once would take our answer away with it."""
    left = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                event = await request.receive()
                if event["type"] != "http.request" or not event.get("more_body", False):
                    return
                left -= len(event.get("body", b""))


def _dataset(name: str) -> str:
    if not _DATASET.match(name):
        raise BadInput(
            "a dataset's name has 1 to 120 letters, digits, . _ or -, and begins with a letter or digit"
        )
    return name


def _json(message: Part, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(message.model_dump_json(), int(status), headers, "application/json")


def _explain_errors(app: FastAPI) -> None:
    def answer(status: HTTPStatus, detail: str, code: str, **more: Any) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = "1"
        if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers["Connection"] = "close"  # or the rest of the body would be read, however long it is
        return JSONResponse(problem(status, detail, code, **more), int(status), headers, MEDIA_TYPE)

    @app.exception_handler(DmscError)
    async def ours(request: Request, error: DmscError) -> JSONResponse:
        if isinstance(error, TooLarge):
            await _discard(request)
        more: dict[str, Any] = {"retryable": error.retryable}
        if "problems" in error.fields:
            more["problems"] = str(error.fields["problems"]).split("\n")
        return answer(status_of(error), error.text, error.code, **more)

    @app.exception_handler(RequestValidationError)
    async def theirs(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return answer(HTTPStatus.UNPROCESSABLE_ENTITY, f"{place}: {first['msg']}", BadInput.code)

    @app.exception_handler(HTTPException)
    async def starlettes(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        code = {404: NotFound.code, 405: "method_not_allowed"}.get(error.status_code, BadInput.code)
        return answer(status, f"{request.method} {request.url.path}: {status.phrase}", code)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", path=request.url.path, exc_info=error)
        return answer(
            HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed; its log says why", DmscError.code
        )


class RequestLog:
    """ASGI: one line per request, and a count. Never the headers or the query, which may hold secrets."""

    def __init__(self, app: ASGIApp, metrics: DoorMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, sent = time.monotonic(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._metrics.answered[status] += 1
            told = log.debug if scope["path"] in ("/healthz", "/metrics") else log.info
            took_ms = round(1e3 * (time.monotonic() - begun), 1)
            told(
                "http request",
                gateway=self._metrics.gateway,
                method=scope["method"],
                path=scope["path"],
                status=status,
                bytes=sent,
                ms=took_ms,
            )
