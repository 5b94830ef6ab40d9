"""The dashboard's doors without a browser: files, the aggregated view, live events, logs, the tap."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from entities.gateway import Gateway
from entities.gateway.dashboard.aggregator import DashboardAggregator
from entities.gateway.dashboard.assets import assets
from schemas.data_plane import RouteEntry, RouteTable
from schemas.envelope import EntityKind
from schemas.gateway_api import DoorRequest, JobSummary, MeshStatus
from schemas.job import JobEvent, StepResult
from schemas.telemetry import LogLine
from tests.builders.jobs import spec
from tests.builders.records import instance
from tests.builders.telemetry import linked_sample as sample
from tests.integration.entities.conftest import Dial, bearer
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually


class Events:
    """Server-sent events of one response, as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._records = self._read()

    async def _read(self) -> AsyncIterator[tuple[str, Any]]:
        waiting = ""
        async for piece in self.response.aiter_text():
            waiting += piece
            while "\n\n" in waiting:
                record, waiting = waiting.split("\n\n", 1)
                fields = dict(line.split(": ", 1) for line in record.split("\n") if not line.startswith(":"))
                if "data" in fields:
                    yield fields.get("event", ""), json.loads(fields["data"])

    async def until(self, event: str, fits: Any = lambda data: True) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                name, data = await anext(self._records)
                if name == event and fits(data):
                    return data


@contextlib.asynccontextmanager
async def events(http: httpx.AsyncClient, path: str, user: str, **query: Any) -> AsyncIterator[Events]:
    async with http.stream("GET", path, headers=bearer(user), params=query, timeout=None) as response:
        if response.status_code != 200:
            await response.aread()
            raise AssertionError(f"{response.status_code} {response.text}")
        yield Events(response)


def step(number: int, loss: float) -> JobEvent:
    result = StepResult(
        step=number,
        loss=loss,
        gradient_norm=1.0,
        learning_rate=1e-3,
        tokens=64,
        step_s=0.1,
        tokens_per_s=640.0,
    )
    return JobEvent(job="tiny-1", kind="step", at=time.time(), result=result)


async def test_the_files_come_without_a_token_under_a_strict_policy(http: httpx.AsyncClient) -> None:
    front = await http.get("/", follow_redirects=True)
    assert front.status_code == 200
    assert front.url.path == "/dashboard/"
    policy = front.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert front.headers["x-content-type-options"] == "nosniff"
    again = await http.get("/dashboard/", headers={"If-None-Match": front.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in assets():
        answer = await http.get(f"/dashboard/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == policy
    for path in ("../routes.py", "%2e%2e/routes.py", "js/", "vendor/uplot/README.md", "js/none.js"):
        assert (await http.get(f"/dashboard/{path}")).status_code == 404


def test_the_page_asks_nobody_but_its_own_gateway() -> None:
    """No external address, no inline script or style, nothing that makes markup of text."""
    for path, asset in assets().items():
        text = asset.body.decode()
        if path.startswith("vendor/"):
            continue
        addresses = set(re.findall(r"https?://[^\s\"'`)<]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{path}: {addresses}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
    page = assets()["index.html"].body.decode()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert " style=" not in page
    assert " on" not in re.sub(r">[^<]*<", "><", page).replace(" only", "")


async def test_an_overview_needs_a_token_and_has_all_that_a_page_needs(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    assert (await http.get("/v1/overview")).status_code == 401
    assert (await http.get("/v1/overview", headers=bearer("nobody"))).status_code == 401
    await http.post("/v1/jobs", headers=bearer("ruth"), content=spec().model_dump_json())
    await smo.bus.append(subjects.JOB_EVENT, step(0, 3.5), job="tiny-1")
    answer = await http.get("/v1/overview", headers=bearer("vera"))
    assert answer.status_code == 200
    view = answer.json()
    assert view["you"] == {"user": "vera", "role": "viewer", "gateway": "gateway-east"}
    assert [job["job"] for job in view["jobs"]] == ["tiny-1"]
    assert view["curves"]["tiny-1"]["points"][0][2] == 3.5
    assert "gateway-east" in {row["sid"] for row in view["entities"]}
    assert view["trouble"] == {}


async def test_an_overview_has_the_parts_that_are_asked_for(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    async def overview(*parts: str) -> httpx.Response:
        return await http.get("/v1/overview", headers=bearer("vera"), params={"part": parts})

    await http.post("/v1/jobs", headers=bearer("ruth"), content=spec().model_dump_json())
    await smo.bus.append(subjects.JOB_EVENT, step(0, 3.5), job="tiny-1")
    entry = RouteEntry(sid="tiny-1-s0-r0", incarnation="i1", cluster="east", weight=1.0, window=2)
    table = RouteTable(job="tiny-1", cluster="east", stage=0, revision=3, router="r", entries=(entry,))
    await smo.bus.bucket(subjects.ROUTE_TABLE).put(table, job="tiny-1", cluster="east", stage=0)
    view = (await overview("progress", "traffic", "routes", "links")).json()
    assert view.keys() == {"you", "sequence", "at", "progress", "traffic", "routes", "links", "trouble"}
    assert [(row["job"], row["step"], row["loss"]) for row in view["progress"]] == [("tiny-1", 1, 3.5)]
    (stage,) = view["routes"]
    assert (stage["measured_steps"], stage["tables"]) == (1, {"east": table.model_dump(mode="json")})
    assert (await overview("secrets")).status_code == 422
    assert "routes" not in (await overview()).json()


async def test_live_begins_with_the_whole_and_goes_on_with_what_changes(
    http: httpx.AsyncClient, gateway: Gateway, smo: StandInOrchestrator
) -> None:
    await http.post("/v1/jobs", headers=bearer("ruth"), content=spec().model_dump_json())
    async with events(http, "/v1/live", "vera") as one, events(http, "/v1/live", "olga") as other:
        assert (await one.until("you"))["role"] == "viewer"
        assert [job["job"] for job in (await one.until("overview"))["jobs"]] == ["tiny-1"]
        await other.until("overview")
        await smo.bus.append(subjects.JOB_EVENT, step(1, 2.5), job="tiny-1")
        for viewer in (one, other):
            delta = await viewer.until("delta", lambda data: "steps" in data)
            assert delta["steps"][0][:2] == ["tiny-1", 1]
        feed: DashboardAggregator = _feed(gateway)
        assert feed.watched == 2
        assert len(feed._subscriptions) == 8  # one set for both
    await eventually(lambda: feed.watched == 0)


async def test_instances_appear_with_their_samples(
    http: httpx.AsyncClient, dial: Dial, gateway: Gateway, smo: StandInOrchestrator
) -> None:
    from bus.mesh.registration import RegistrationClient

    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    async with events(http, "/v1/live", "vera") as viewer:
        await viewer.until("overview")
        record = instance("j-s0-r0", incarnation=bus.sender.incarnation)
        async with RegistrationClient(bus, record):
            await viewer.until("delta", lambda data: _has(data, "j-s0-r0"))
            told = sample("j-s0-r0", incarnation=bus.sender.incarnation, busy=0.75)
            await bus.publish(subjects.INSTANCE_SAMPLE, told, job="j", sid="j-s0-r0")
            delta = await viewer.until("delta", lambda data: _has(data, "j-s0-r0", busy=0.75))
    assert delta["instances"][0]["links"][0][0] == "j-s1-r0"


async def test_the_feed_rests_when_nobody_looks_and_closes_with_the_gateway(
    dial: Dial, smo: StandInOrchestrator
) -> None:
    from entities.gateway.dashboard.aggregator import AggregatorConfig

    bus = await dial("gateway-east", EntityKind.GATEWAY)
    feed = DashboardAggregator(bus, dict, AggregatorConfig(lingers_s=0.05))
    async with feed.viewer() as viewer:
        assert await viewer.next(PATIENCE_S) is not None
        assert feed.running
    await eventually(lambda: not feed.running)
    assert (await feed.whole())["jobs"] == []
    await feed.close()
    await feed.close()
    assert not feed.running


async def test_a_page_that_is_opened_late_shows_a_running_job_from_its_first_step(
    dial: Dial, smo: StandInOrchestrator
) -> None:
    """Whichever gateway it asks, and after a reload: the past is on the job's stream."""
    from entities.gateway.dashboard.aggregator import AggregatorConfig

    for number in range(5):
        await smo.bus.append(subjects.JOB_EVENT, step(number, 2.5), job="tiny-1")
    told = JobEvent(job="tiny-1", kind="validation", at=time.time(), validation_step=5, validation_loss=2.0)
    await smo.bus.append(subjects.JOB_EVENT, told, job="tiny-1")
    running = JobSummary(job="tiny-1", name="tiny", state="running", step=5, steps=9)
    status = MeshStatus(services=(), nodes=(), jobs=(running,))
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    feed = DashboardAggregator(bus, dict, AggregatorConfig(past_s=-60.0), lambda: status)

    async def shown() -> dict[str, Any] | None:
        frame = await viewer.next(PATIENCE_S)
        assert frame is not None
        (data,) = re.findall(r"^data: (.*)$", frame.decode(), re.M)
        curves: dict[str, Any] = json.loads(data).get("curves", {})
        return curves.get("tiny-1")

    async with feed.viewer() as viewer:
        curve = await eventually(shown)
    await feed.close()
    assert [point[0] for point in curve["points"]] == [0, 1, 2, 3, 4]
    assert [point[0] for point in curve["validations"]] == [5]


async def test_logs_are_searched_by_text_level_and_service_and_keep_secrets(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    lines = (
        LogLine(level="info", event="step committed", fields={"step": "3", "api_key": "hunter2"}),
        LogLine(level="error", event="Link broke", fields={"peer": "j-s1-r0"}, job="j"),
    )
    for line in lines:
        await smo.bus.publish(subjects.LOG, line, sid="orchestrator")

    async def found(**query: Any) -> list[dict[str, Any]]:
        answer = await http.get("/v1/logs", headers=bearer("vera"), params={"sid": "orchestrator"} | query)
        assert answer.status_code == 200, answer.text
        rows: list[dict[str, Any]] = answer.json()["lines"]
        return rows

    async def both() -> bool:
        return len(await found()) == 2

    await eventually(both)
    assert [line["event"] for line in await found(text="LINK")] == ["Link broke"]
    assert [line["event"] for line in await found(level="warning")] == ["Link broke"]
    assert [line["event"] for line in await found(text="hunter2")] == []
    committed = (await found(text="committed"))[0]
    assert "api_key=***" in committed["fields"]
    assert await found(start=committed["sequence"] + 1, text="committed") == []
    assert await found(sid="nobody") == []
    for query in ({"level": "loud"}, {"limit": 0}, {"sid": "a b"}, {"since_s": -1}):
        answer = await http.get("/v1/logs", headers=bearer("vera"), params=query)
        assert answer.status_code in (404, 422)
    assert (await http.get("/v1/logs")).status_code == 401


async def test_a_tap_shows_what_its_role_may_see_decoded_and_without_secrets(
    http: httpx.AsyncClient, dial: Dial, smo: StandInOrchestrator
) -> None:
    client = await dial("somebody")
    async with events(http, "/v1/tap", "vera", subject=">") as tap:
        ready = await tap.until("ready")
        assert "door" in ready["hidden"]
        await _ask(client)
        await smo.bus.append(subjects.JOB_EVENT, step(4, 2.0), job="tiny-1")
        shown: list[dict[str, Any]] = []
        while not any(message["subject"] == "job.event.tiny-1" for message in shown):
            shown += (await tap.until("messages"))["messages"]
        assert not [message for message in shown if message["subject"].startswith("door.")]
        event = next(message for message in shown if message["subject"] == "job.event.tiny-1")
        assert event["message"]["body"]["result"]["step"] == 4
    async with events(http, "/v1/tap", "olga", subject="door.>") as tap:
        await tap.until("ready")
        await _ask(client)
        batch = await tap.until("messages")
        assert "hunter2" not in json.dumps(batch)
        assert batch["messages"][0]["message"]["body"]["token"] == "***"


async def test_a_tap_is_refused_where_the_role_may_see_nothing_of_it(http: httpx.AsyncClient) -> None:
    cases = (
        ("vera", {"subject": "door.>"}, 403),
        ("vera", {"subject": "nonsense.>"}, 422),
        ("vera", {"where": "nofield=1"}, 422),
        ("nobody", {}, 401),
    )
    for user, query, status in cases:
        answer = await http.get("/v1/tap", headers=bearer(user), params=query)
        assert answer.status_code == status, (user, query, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_revoked_token_ends_the_stream(
    http: httpx.AsyncClient, gateway: Gateway, smo: StandInOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schemas.errors import Refused

    async with events(http, "/v1/live", "vera") as viewer:
        await viewer.until("overview")

        async def refuse(*_: Any) -> None:
            raise Refused("the token was revoked", user="vera")

        monkeypatch.setattr(gateway.jobs.access, "check", refuse)
        assert (await viewer.until("refused"))["detail"] == "the token was revoked"
        with pytest.raises(StopAsyncIteration):
            await viewer.until("delta")


async def _ask(client: Bus) -> None:
    request = DoorRequest(token="hunter2", action="job.list")
    with contextlib.suppress(Exception):  # refused: what travels is what counts
        await client.request(subjects.DOOR, request, action="list")


def _has(delta: dict[str, Any], sid: str, **fields: Any) -> bool:
    return any(
        row["sid"] == sid and all(row.get(name) == value for name, value in fields.items())
        for row in delta.get("instances", ())
    )


def _feed(gateway: Gateway) -> DashboardAggregator:
    assert gateway.http is not None
    return gateway.http.dashboard.aggregator
