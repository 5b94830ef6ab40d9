"""A stand-in for a gateway's HTTP door: it tells a scripted job, so that the client's own behaviour is seen.

The real door is used wherever a mesh runs (`test_mesh.py`); here are breaks that a real one shows rarely.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.middleware.base import RequestResponseEndpoint

from schemas.job import ENDED, JobEvent, JobRecord, JobSpec, JobState, WeightsManifest
from schemas.weights_digest import INDEX_NAME, tensor_line, weights_sha256
from tests.builders import job_events as events

TOKEN = "stand-in-token"
CONTENT = bytes(range(256)) * 16
_header = json.dumps({"w": {"dtype": "F32", "shape": [32, 32], "data_offsets": [0, len(CONTENT)]}}).encode()
SHARD = len(_header).to_bytes(8, "little") + _header + CONTENT
"""A safetensors file with one tensor of 1,024 numbers."""


@dataclass
class StandIn:
    """One job's script and what was asked. `break_after`: cut the stream once after so many events."""

    script: list[JobEvent]
    break_after: int | None = None
    hold_open: bool = False  # the script does not end the job: only a cancel does
    damage: bool = False  # one byte of the weights is wrong
    without_bus: int = 0  # so many requests find its bus away
    load: tuple[tuple[str, float], ...] = ()  # (SID, milliseconds per microbatch) as measured now
    asked: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    state: JobState = JobState.RUNNING
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    def record(self) -> JobRecord:
        weights = None
        if self.state is JobState.DONE:
            line = tensor_line("float32", [32, 32], hashlib.sha256(CONTENT).hexdigest())
            weights = WeightsManifest(
                url="bus://x",
                shards=("s0.safetensors", INDEX_NAME),
                tensors={"w": "s0.safetensors"},
                bytes=len(SHARD),
                sha256=weights_sha256({"w": line}),
                step=2,
            )
        return events.record(2, self.state).model_copy(
            update={"weights": weights, "sample": "def f(): pass\n"}
        )

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def door(request: Request, call_next: RequestResponseEndpoint) -> Response:
            self.asked.append(f"{request.method} {request.url.path}")
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                body = {"status": 401, "detail": "unknown token", "code": "refused"}
                return JSONResponse(body, 401, media_type="application/problem+json")
            if self.without_bus:
                self.without_bus -= 1
                body = {"status": 503, "detail": "no bus at nats://there", "code": "bus_unreachable"}
                return JSONResponse(
                    body, 503, media_type="application/problem+json", headers={"Retry-After": "1"}
                )
            return await call_next(request)

        @app.post("/v1/jobs")
        async def submit(request: Request) -> Response:
            JobSpec.model_validate(await request.json())
            return Response(self.record().model_dump_json(), 201, media_type="application/json")

        @app.get("/v1/jobs/j1")
        async def job() -> Response:
            return Response(self.record().model_dump_json(), media_type="application/json")

        @app.post("/v1/jobs/j1/cancel")
        async def cancel() -> Response:
            self.cancelled.set()
            return Response(self.record().model_dump_json(), media_type="application/json")

        @app.get("/v1/jobs/j1/load")
        async def load() -> Response:
            return Response(events.load(*self.load).model_dump_json(), media_type="application/json")

        @app.get("/v1/jobs/j1/events")
        async def stream(start: int) -> Response:
            self.starts.append(start)
            return StreamingResponse(self._events(start), media_type="text/event-stream")

        @app.get("/v1/jobs/j1/weights")
        async def weights() -> Response:
            manifest = self.record().weights
            assert manifest is not None
            return Response(manifest.model_dump_json(), media_type="application/json")

        @app.get("/v1/jobs/j1/weights/s0.safetensors")
        async def shard() -> Response:
            return Response(SHARD[:-1] + b"?" if self.damage else SHARD)

        return app

    async def _events(self, start: int) -> AsyncIterator[bytes]:
        for sequence, event in enumerate(self.script, 1):
            if sequence < start:
                continue
            if self.break_after is not None and sequence > self.break_after:
                self.break_after = None
                raise ConnectionError("cut")
            if event.state in ENDED:
                self.state = event.state
            yield _sse(sequence, event)
        if self.hold_open:
            await self.cancelled.wait()
            self.state = JobState.CANCELLED
            yield _sse(len(self.script) + 1, events.state(JobState.CANCELLED, "asked for"))

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve on a free port, on a thread; gives the URL."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            config = uvicorn.Config(
                self.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
            )
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
            thread.start()
            try:
                yield self.url
            finally:
                server.should_exit = True
                thread.join(10)


def whole_run() -> list[JobEvent]:
    """A job of two steps that ends well."""
    return [
        events.state(JobState.RUNNING),
        events.instances(("j1-s0-r0", 0, "active"), ("j1-s1-r0", 1, "active")),
        events.step(0, 4.0, steps=2),
        events.step(1, 3.0, steps=2),
        events.state(JobState.DONE),
    ]


def _sse(sequence: int, event: JobEvent) -> bytes:
    data = json.dumps(event.model_dump(mode="json", exclude_none=True))
    return f"id: {sequence}\nevent: {event.kind}\ndata: {data}\n\n".encode()
