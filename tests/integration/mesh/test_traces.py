"""A real job's trace as an OTLP receiver gets it: `dmsc run tracer` beside a mesh, a caller's trace kept."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from dmsc.state.settings import find_gateway
from schemas.job import JobState
from tests.integration.mesh.conftest import Mesh, tiny_job
from tests.patience import PATIENCE_S

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STEPS = 12


class Receiver:
    """POST /v1/traces, as a collector answers it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.changed = threading.Condition()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        with self.changed:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(
                    {one.key: one.value.string_value for one in resource.resource.attributes}
                )
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.changed.notify_all()

    def until(self, name: str, ended: Callable[[], bool]) -> bool:
        """Whether the span came before who sends it `ended`."""

        def found() -> bool:
            return any(span.name == name for span in self.spans)

        with self.changed:
            assert self.changed.wait_for(lambda: found() or ended(), PATIENCE_S)
            return found()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield found, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_a_jobs_spans_arrive_as_one_tree_below_its_callers(
    mesh: Mesh, receiver: tuple[Receiver, str]
) -> None:
    collector, url = receiver
    environment = {
        **os.environ,
        "DMSC_BUS": ",".join(mesh.servers),
        "DMSC_BUS_TOKEN": mesh.bus_token or "",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_SERVICE_NAME": "dmsc-test",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    command = ["-m", "dmsc", "run", "tracer", "--metrics-port", "off", "--parent", str(os.getpid())]
    tracer = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, stderr=asyncio.subprocess.PIPE
    )
    said = asyncio.create_task(heard(tracer, ready := asyncio.Event()))
    said.add_done_callback(lambda _: collector.wake())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ready.wait()
        job = await submitted(mesh)
        record = await asyncio.to_thread(mesh.client.wait, job)
        assert record.state is JobState.DONE
        assert record.correlation == TRACE
        assert await asyncio.to_thread(collector.until, "job", said.done), await said
    finally:
        with suppress(ProcessLookupError):
            tracer.terminate()
        await said
        await tracer.wait()
    spans = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = [span for span in spans if span.name == "job"]
    assert root.parent_span_id.hex() == CALLER
    assert all(span.parent_span_id in by_id for span in spans if span is not root), "the tree is whole"
    names = {span.name for span in spans}
    assert names >= {"queued", "analyse", "deploy", "plan", "start", "train", "step 0", "step 10", "finish"}
    assert names >= {"begin", "claims", "prepare", "decide", "commit"}
    assert "step 1" not in names, "every tenth"
    below: dict[bytes, list[str]] = {}
    for span in sorted(spans, key=lambda one: one.start_time_unix_nano):
        below.setdefault(span.parent_span_id, []).append(span.name)
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    (first,) = [span for span in spans if span.name == "step 0"]
    assert below[first.span_id] == ["begin", "claims", "prepare", "decide", "commit"]
    assert {one["service.name"] for one in collector.resources} == {"dmsc-test"}


async def heard(tracer: asyncio.subprocess.Process, ready: asyncio.Event) -> str:
    """What it says until it ends."""
    assert tracer.stderr is not None
    lines: list[str] = []
    async for line in tracer.stderr:
        lines.append(line.decode())
        if "tracer ready" in lines[-1]:
            ready.set()
    ready.set()
    return "".join(lines)


async def submitted(mesh: Mesh) -> str:
    """As a traced caller does it."""
    spec = tiny_job(training={"steps": STEPS})
    address = find_gateway(state=mesh.state)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        headers = {"Authorization": f"Bearer {address.token}", "traceparent": f"00-{TRACE}-{CALLER}-01"}
        answer = await http.post(
            f"{address.urls[0]}/v1/jobs", content=spec.model_dump_json(), headers=headers
        )
    assert answer.status_code == 201, answer.text
    assert answer.headers["X-Correlation-Id"] == TRACE
    job: str = answer.json()["job"]
    return job
