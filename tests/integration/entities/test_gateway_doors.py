"""MG's two doors, HTTP and NATS, against a real server and authorizer (draft §3 MG; Type 3 each time)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from bus import subjects
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.sse.format import EventsConfig
from entities.gateway.operations.access_client import AccessClientConfig
from entities.metrics import HTTP_REQUESTS
from entities.service_registry.service import ServiceRegistry
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadInput, NoResponders
from schemas.gateway_api import Cordons
from schemas.job import JobState
from schemas.signals import AccessRequest, ComputeNotification
from tests.builders.telemetry import compute
from tests.integration.entities.conftest import Dial, Start, bearer, end, write_users
from tests.integration.entities.gateway_answers import JOB, check_problem, submit
from tests.integration.entities.stand_in_orchestrator import SHARD, StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually

LIMITS = HttpConfig(
    max_job_bytes=20_000, max_dataset_bytes=300_000, events=EventsConfig(keepalive_s=0.2, tail_s=0.1)
)


@pytest.fixture
def door() -> HttpConfig:
    return LIMITS


async def test_where_its_door_is_stands_in_its_record(
    gateway: Gateway, registry: ServiceRegistry, smo: StandInOrchestrator
) -> None:
    record = registry.core.record("gateway-east")
    assert record is not None
    assert record.endpoint.address == gateway.url
    assert gateway.url is not None
    assert gateway.url.startswith("http://127.0.0.1:")
    await eventually(lambda: smo.nodes)
    assert (smo.nodes[0].sid, smo.nodes[0].kind) == ("gateway-east", "gateway")
    assert "http" in smo.nodes[0].services


async def test_submit_list_read_park_cancel(http: httpx.AsyncClient, smo: StandInOrchestrator) -> None:
    response = await http.post("/v1/jobs", json=JOB, headers=bearer("ruth"))
    assert (response.status_code, response.headers["location"]) == (201, "/v1/jobs/tiny-1")
    assert response.json()["state"] == "queued"
    assert smo.users == ["ruth"], "whoever the token belongs to, not whoever one says one is"
    assert [job["job"] for job in (await http.get("/v1/jobs", headers=bearer("vera"))).json()["jobs"]] == [
        "tiny-1"
    ]
    assert (await http.get("/v1/jobs/tiny-1", headers=bearer("vera"))).json()["spec"]["name"] == "tiny"
    for verb in ("cancel", "park", "resume"):
        check_problem(await http.post(f"/v1/jobs/tiny-1/{verb}", headers=bearer("rob")), 403, "refused")
    response = await http.post("/v1/jobs/tiny-1/park?reason=urgent", headers=bearer("olga"))
    assert (response.json()["state"], response.json()["reason"]) == ("parked", "parked by olga: urgent")
    response = await http.post("/v1/jobs/tiny-1/resume", headers=bearer("ruth"))
    assert (response.json()["state"], response.json()["reason"]) == ("running", "resumed by ruth")
    response = await http.post("/v1/jobs/tiny-1/cancel?reason=typo", headers=bearer("ruth"))
    assert response.json()["state"] == "cancelled"
    check_problem(await http.post("/v1/jobs/tiny-1/cancel", headers=bearer("olga")), 409, "conflict")


async def test_what_a_jobs_instances_measure_now_comes_from_type_4(
    http: httpx.AsyncClient, smo: StandInOrchestrator, gateway: Gateway
) -> None:
    assert (await http.get("/v1/jobs/j/load", headers=bearer("vera"))).json() == {"job": "j", "entries": []}
    told = {
        "east": (compute("j-s0-r0", service_ms=12.5), compute("k-s0-r0", job="k")),
        "west": (compute("j-s0-r1", queue=3),),
    }
    for cluster, entries in told.items():
        message = ComputeNotification(
            router=f"router-{cluster}", cluster=cluster, revision=1, entries=entries
        )
        await smo.bus.publish(subjects.COMPUTE, message, cluster=cluster)
    await eventually(lambda: len(gateway._last_compute()) == 2)
    load = (await http.get("/v1/jobs/j/load", headers=bearer("vera"))).json()
    assert [(one["sid"], one["service_ms"], one["queue"]) for one in load["entries"]] == [
        ("j-s0-r0", 12.5, 0),
        ("j-s0-r1", 5.0, 3),
    ]
    check_problem(await http.get("/v1/jobs/j/load"), 401, "refused")


async def test_a_request_begins_a_correlation_or_goes_on_with_its_callers(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    given = [
        {},
        {"X-Correlation-Id": "mine-1"},
        {"traceparent": f"00-{trace}-{span}-01"},
        {"X-Correlation-Id": "a b"},
    ]
    answers = [
        await http.post("/v1/jobs", json=JOB, headers={**bearer("ruth"), **headers}) for headers in given
    ]
    assert [answer.status_code for answer in answers] == [201] * 4
    told = [answer.headers["X-Correlation-Id"] for answer in answers]
    assert smo.origins == [(told[0], ""), ("mine-1", ""), (trace, span), (told[3], "")]
    assert told[0] != told[3] != "a b"
    assert "X-Correlation-Id" in (await http.get("/v1/nothing")).headers


async def test_the_mesh_and_health(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    mesh = (await http.get("/v1/mesh", headers=bearer("vera"))).json()
    assert mesh["services"][0]["sid"] == "gateway-east"
    api = (await http.get("/v1/openapi.json")).json()
    assert "/v1/jobs/{job}/events" in api["paths"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "ruth"}, 401),
        ({"Authorization": "Basic cnV0aA=="}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer vera"}, 403),
    ],
)
async def test_who_may_not_is_told_so(http: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    response = await http.post("/v1/jobs", json=JOB, headers=headers)
    check_problem(response, status, "refused")
    assert ("www-authenticate" in response.headers) is (status == 401)


@pytest.mark.parametrize(
    ("document", "detail"),
    [
        (
            JOB | {"training": {"steps": 2, "stepz": 3}},
            "training.stepz: unknown key; did you mean training.steps?",
        ),
        (
            JOB | {"training": {"steps": "many"}},
            "training.steps: 'many' does not fit; give a whole number ≥ 1",
        ),
        (
            JOB | {"parallel": {"stages": 2, "replicas": [1, 2, 3]}},
            "parallel: replicas names 3 stages, but stages is 2",
        ),
    ],
)
async def test_a_wrong_job_is_one_line_with_the_key(
    http: httpx.AsyncClient, document: Any, detail: str
) -> None:
    response = await http.post("/v1/jobs", json=document, headers=bearer("ruth"))
    body = check_problem(response, 422, "bad_job")
    assert body["detail"] == detail
    assert body["problems"] == [detail]


async def test_other_bad_requests(http: httpx.AsyncClient) -> None:
    ruth = bearer("ruth")
    body = check_problem(await http.post("/v1/jobs", content=b'{"name": ', headers=ruth), 422, "bad_job")
    assert body["detail"].startswith("not valid JSON")
    check_problem(await http.post("/v1/jobs", content=b"x" * 20_001, headers=ruth), 413, "too_large")

    async def chunks() -> AsyncIterator[bytes]:  # no Content-Length
        for _ in range(30):
            yield b"x" * 1_000

    check_problem(await http.post("/v1/jobs", content=chunks(), headers=ruth), 413, "too_large")
    check_problem(await http.get("/v1/jobs/nothing", headers=ruth), 404, "not_found")
    check_problem(await http.get("/v1/jobs/a%20b", headers=ruth), 404, "not_found")
    check_problem(await http.get("/v1/nothing", headers=ruth), 404, "not_found")
    check_problem(await http.delete("/v1/jobs", headers=ruth), 405, "method_not_allowed")
    check_problem(await http.get("/v1/jobs/nothing/events?start=x", headers=ruth), 422, "bad_input")


async def test_without_an_orchestrator_it_says_so_and_goes_on(
    dial: Dial, start: Start, authorizer: Authorizer
) -> None:
    service = Gateway(
        await dial("gateway-east", EntityKind.GATEWAY), GatewayConfig(cluster="east", http_port=0)
    )
    await start(service)
    async with httpx.AsyncClient(base_url=service.url or "", trust_env=False) as http:
        response = await http.get("/v1/mesh", headers=bearer("ruth"))
        check_problem(response, 503, "no_responders")
        assert response.headers["retry-after"] == "1"
        assert (await http.get("/healthz")).status_code == 200
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["waiting"]) == (
            503,
            {"orchestrator": "none leads (no_responders)"},
        )
        jobs = await http.get("/v1/jobs", headers=bearer("ruth"))
        assert (jobs.status_code, jobs.json()["jobs"]) == (200, []), "what the bucket has, nobody need tell"


async def test_a_request_waits_for_an_authorizer_that_is_back_after_the_gateway(
    dial: Dial,
    start: Start,
    registry: ServiceRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the bus's server was restarted, and the gateway has reached it first."""
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    ask, in_vain = bus.connection.ask, asyncio.Event()

    async def asked(subject: str, *given: Any, **more: Any) -> Any:
        try:
            return await ask(subject, *given, **more)
        except NoResponders:
            in_vain.set()
            raise

    monkeypatch.setattr(bus.connection, "ask", asked)
    patient = AccessClientConfig(timeout_s=PATIENCE_S, absent_s=PATIENCE_S)
    service = Gateway(bus, GatewayConfig(cluster="east", http_port=0, guard=patient))
    await start(service)
    async with httpx.AsyncClient(base_url=service.url or "", timeout=PATIENCE_S, trust_env=False) as http:
        asking = asyncio.create_task(http.get("/v1/jobs", headers=bearer("ruth")))
        await asyncio.wait_for(in_vain.wait(), PATIENCE_S)
        users = write_users(tmp_path / "tokens.yaml", ("ruth", "researcher", "ruth"))
        config = AuthorizerConfig(tokens_file=users)
        await start(Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config))
        assert (await asking).status_code == 200


# --- events -----------------------------------------------------------------------------------------------


async def read_events(
    http: httpx.AsyncClient, job: str, query: str = "", **headers: str
) -> list[tuple[int, str]]:
    """(id, state) of a job's event stream until it ends."""
    found = []
    headers = bearer("vera") | {key.replace("_", "-"): value for key, value in headers.items()}
    async with http.stream("GET", f"/v1/jobs/{job}/events{query}", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        sequence = 0
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                sequence = int(line[4:])
            elif line.startswith("data: "):
                found.append((sequence, json.loads(line[6:])["state"]))
    return found


async def test_events_are_replayed_then_followed_until_the_end(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    job = await submit(http)
    other = await submit(http)
    await smo.tell(job, JobState.ANALYSING)
    reading = asyncio.create_task(read_events(http, job))
    await smo.tell(other, JobState.ANALYSING)
    await smo.tell(job, JobState.FAILED)
    found = await asyncio.wait_for(reading, PATIENCE_S)
    assert [state for _, state in found] == ["queued", "analysing", "failed"]
    sequences = [sequence for sequence, _ in found]
    assert sequences == sorted(sequences)

    assert await read_events(http, job) == found, "replayed in full after the end"
    assert await read_events(http, job, last_event_id=str(sequences[0])) == found[1:]
    assert await read_events(http, job, f"?start={sequences[2]}") == found[2:]
    assert await read_events(http, job, last_event_id=str(sequences[2])) == [], (
        "ends, though nothing is left to say"
    )


async def test_a_client_that_leaves_ends_its_stream(http: httpx.AsyncClient, gateway: Gateway) -> None:
    job = await submit(http)
    await http.get(f"/v1/jobs/{job}", headers=bearer("vera"))  # whoever is hired at the first question is
    before = len(asyncio.all_tasks())
    async with http.stream("GET", f"/v1/jobs/{job}/events", headers=bearer("vera")) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
    await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def test_events_of_nothing_are_a_404(http: httpx.AsyncClient) -> None:
    check_problem(await http.get("/v1/jobs/nothing/events", headers=bearer("vera")), 404, "not_found")


# --- weights and datasets -----------------------------------------------------------------------------


async def test_weights_come_out_whole_and_in_ranges(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    job = await submit(http)
    vera = bearer("vera")
    body = check_problem(await http.get(f"/v1/jobs/{job}/weights", headers=vera), 404, "not_found")
    assert "has no weights" in body["detail"]
    await smo.finish(job)
    manifest = (await http.get(f"/v1/jobs/{job}/weights", headers=vera)).json()
    path = f"/v1/jobs/{job}/weights/{manifest['shards'][0]}"
    ruth = bearer("ruth")
    check_problem(await http.get(path, headers=vera), 403, "refused")  # the numbers are their owner's
    whole = await http.get(path, headers=ruth)
    assert (whole.status_code, whole.content) == (200, SHARD)
    assert whole.headers["accept-ranges"] == "bytes"
    part = await http.get(path, headers=ruth | {"Range": "bytes=256-511"})
    assert (part.status_code, part.content) == (206, SHARD[256:512])
    assert part.headers["content-range"] == f"bytes 256-511/{len(SHARD)}"
    check_problem(
        await http.get(path, headers=ruth | {"Range": "bytes=99999999-"}), 416, "range_not_satisfiable"
    )
    for wrong in ("other.safetensors", "..%2f..%2fsecret"):
        assert (await http.get(f"/v1/jobs/{job}/weights/{wrong}", headers=ruth)).status_code == 404


@pytest.mark.parametrize("key", ["resume_from", "initial_weights"])
async def test_a_job_begins_with_what_its_user_may_read(
    http: httpx.AsyncClient, smo: StandInOrchestrator, key: str
) -> None:
    theirs, mine = await submit(http, "olga"), await submit(http, "ruth")
    for url, whose in (
        (f"bus://artifacts/{theirs}/checkpoints", f"{theirs}: it is olga's"),
        (f"bus://artifacts/x/{mine}/checkpoints", "nobody's"),
        ("bus://artifacts/team/checkpoints", "nobody's"),
    ):
        response = await http.post("/v1/jobs", json=JOB | {key: url}, headers=bearer("ruth"))
        detail = check_problem(response, 403, "refused")["detail"]
        assert detail.startswith(f"{key}: {url}: researcher ruth may artifact.read only what is theirs")
        assert whose in detail
        assert "its owner or an administrator may name it" in detail
    for user, url in (
        ("ruth", f"bus://artifacts/{mine}/checkpoints"),
        ("olga", f"bus://artifacts/{mine}/checkpoints"),
        ("olga", "bus://artifacts/team/checkpoints"),
    ):
        response = await http.post("/v1/jobs", json=JOB | {key: url}, headers=bearer(user))
        assert response.status_code == 201, response.text
        assert smo.may_read[-1] == (url,)
    response = await http.post(
        "/v1/jobs", json=JOB | {"artifacts": f"bus://artifacts/{theirs}"}, headers=bearer("ruth")
    )
    assert "lies in the folder of" in check_problem(response, 422, "bad_job")["detail"]


async def test_a_dataset_goes_in_and_comes_out(http: httpx.AsyncClient) -> None:
    data = bytes(range(256)) * 1000
    ruth = bearer("ruth")
    stored = await http.put("/v1/datasets/corpus.txt", content=data, headers=ruth)
    assert (stored.status_code, stored.json()["bytes"]) == (201, len(data))
    assert stored.json()["source"] == "bus://datasets/corpus.txt"
    assert (await http.get("/v1/datasets/corpus.txt", headers=ruth)).content == data
    part = await http.get("/v1/datasets/corpus.txt", headers=ruth | {"Range": "bytes=-7"})
    assert part.content == data[-7:]
    check_problem(await http.put("/v1/datasets/x", content=b"1", headers=bearer("vera")), 403, "refused")
    check_problem(await http.get("/v1/datasets/none", headers=ruth), 404, "not_found")
    check_problem(await http.put("/v1/datasets/a%20b", content=b"1", headers=ruth), 422, "bad_input")


async def test_a_dataset_above_the_limit_is_refused_and_not_kept(http: httpx.AsyncClient) -> None:
    ruth = bearer("ruth")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 50_000

    with contextlib.suppress(httpx.NetworkError):  # it hangs up while we still send
        async with asyncio.timeout(PATIENCE_S):
            check_problem(
                await http.put("/v1/datasets/big", content=endless(), headers=ruth), 413, "too_large"
            )
    check_problem(await http.put("/v1/datasets/big", content=b"x" * 300_001, headers=ruth), 413, "too_large")
    check_problem(await http.get("/v1/datasets/big", headers=ruth), 404, "not_found")


# --- the server itself --------------------------------------------------------------------------------


async def test_a_taken_port_is_one_line(dial: Dial) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = Gateway(
            await dial("gateway-east", EntityKind.GATEWAY), GatewayConfig(cluster="east", http_port=port)
        )
        with pytest.raises(BadInput, match=f"HTTP port {port} on 127.0.0.1 is taken; choose another"):
            await service.run()


async def test_it_installs_no_signal_handlers_and_ends_with_open_streams(
    dial: Dial, start: Start, authorizer: Authorizer, smo: StandInOrchestrator
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    service = Gateway(
        await dial("gateway-east", EntityKind.GATEWAY), GatewayConfig(cluster="east", http_port=0)
    )
    task = await start(service)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    async with httpx.AsyncClient(base_url=service.url or "", trust_env=False, timeout=PATIENCE_S) as http:
        job = await submit(http)
        async with http.stream("GET", f"/v1/jobs/{job}/events", headers=bearer("vera")) as response:
            await anext(response.aiter_lines())
            await end(task)
    async with httpx.AsyncClient(base_url=service.url or "", trust_env=False) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/healthz")


async def test_each_request_is_one_line_in_the_log_without_secrets(http: httpx.AsyncClient) -> None:
    with structlog.testing.capture_logs() as lines:
        await http.get("/v1/jobs?token=ruth-in-query", headers=bearer("ruth"))
    (line,) = [line for line in lines if line["event"] == "http request"]
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/jobs", 200)
    assert "in-query" not in json.dumps(lines, default=str)


async def test_a_client_that_leaves_in_mid_upload_is_one_line_and_counted(
    http: httpx.AsyncClient, gateway: Gateway
) -> None:
    def noted() -> list[Any]:
        return [line for line in lines if line["event"] == "http request"]

    paths = ("/v1/datasets/half", "/v1/code/" + "0" * 64, "/v1/jobs")
    for path in paths:
        with structlog.testing.capture_logs() as lines:
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            method = "POST" if path == "/v1/jobs" else "PUT"
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ruth\r\n"
                "Content-Length: 9000\r\n"
                "Expect: 100-continue\r\n\r\n".encode()
            )
            await reader.readuntil(b"100 Continue\r\n\r\n")  # the gateway reads the body
            writer.write(b"x" * 1000)
            await writer.drain()
            writer.transport.abort()
            await eventually(noted)
        (line,) = noted()
        assert (line["path"], line["status"]) == (path, 499)
        assert not [line for line in lines if "exc_info" in line]
    counted = [reading for reading in gateway.readings() if reading.metric is HTTP_REQUESTS]
    assert HTTP_REQUESTS(len(paths), gateway="gateway-east", status="499") in counted


# --- the NATS door ------------------------------------------------------------------------------------


async def test_a_keyed_request_asks_for_access_once_and_for_what_it_does(
    http: httpx.AsyncClient, gateway: Gateway, smo: StandInOrchestrator
) -> None:
    """A right that it does not use is not asked for, and what is audited stands in the audit once."""

    async def cordons(message: Message, envelope: Envelope) -> Cordons:
        return Cordons(agent="n-1", cordons=())

    for row in (subjects.CORDON_PLACE, subjects.UNCORDON_PLACE):
        await smo.bus.serve(row, cordons)
    job = await submit(http)
    questions: list[tuple[str, str]] = []
    serving = await smo.bus.subscribe(subjects.ACCESS, note(questions))
    for number, (path, action, resource) in enumerate(
        (
            ("nodes/n-1/cordon", "node.cordon", "n-1"),
            ("nodes/n-1/drain", "node.drain", "n-1"),
            ("nodes/n-1/uncordon", "node.uncordon", "n-1"),
            (f"jobs/{job}/park", "job.park", job),
            (f"jobs/{job}/cancel", "job.cancel", job),
        )
    ):
        questions.clear()
        headers = {**bearer("olga"), "Idempotency-Key": f"once-{number}"}
        response = await http.post(f"/v1/{path}", headers=headers)
        assert response.status_code == 200, response.text
        await smo.bus.barrier()
        assert [asked for asked in questions if asked[0] != "self.read"] == [(action, resource)]
    await serving.stop()


def note(questions: list[tuple[str, str]]) -> Callable[[AccessRequest, Envelope], Awaitable[None]]:
    async def arrived(message: AccessRequest, envelope: Envelope) -> None:
        questions.append((message.action, message.resource))

    return arrived
