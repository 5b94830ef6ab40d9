"""What the gateway does under load, at its end, and with others beside it: limits, keys, streams, drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from bus import subjects
from bus.server.embedded import EmbeddedServer
from dmsc import AsyncClient
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.rate_limit import RequestRate
from entities.gateway.http.sse.format import EventsConfig
from entities.gateway.operations.breaker import BreakerConfig, BreakerState
from entities.gateway.operations.idempotency import key_token, request_digest
from entities.service_registry.service import ServiceRegistry
from schemas.cluster import Strike, Struck
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Overloaded, Unavailable
from schemas.gateway_api import KeptAnswer
from schemas.job import JobEvent, JobState
from schemas.signals import Registration
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial, Start, bearer, end
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually

JOB = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}


class Gateways:
    """Starts gateways of this test, each with bounds of its own."""

    def __init__(self, dial: Dial, start: Start) -> None:
        self._dial = dial
        self._start = start
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, cluster: str, **bounds: Any) -> Gateway:
        service = Gateway(
            await self._dial(f"gateway-{cluster}", EntityKind.GATEWAY),
            GatewayConfig(
                cluster=cluster, http_port=0, door=HttpConfig(burst_s=60.0, standing_s=60.0, **bounds)
            ),
        )
        self.tasks[cluster] = await self._start(service)
        return service


@pytest.fixture
def gateways(dial: Dial, start: Start, authorizer: Authorizer, smo: StandInOrchestrator) -> Gateways:
    return Gateways(dial, start)


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        yield client


async def submit(http: httpx.AsyncClient, gateway: Gateway, **headers: str) -> httpx.Response:
    return await http.post(f"{gateway.url}/v1/jobs", json=JOB, headers=bearer("ruth", **headers))


# --- lists, the registry's view, chaos ----------------------------------------------------------------------


async def test_lists_come_in_pages_with_links(gateways: Gateways, http: httpx.AsyncClient) -> None:
    gateway = await gateways.begin("east")
    jobs = [(await submit(http, gateway)).json()["job"] for _ in range(5)]
    found, url = [], f"{gateway.url}/v1/jobs?limit=2&user=ruth"
    pages = 0
    while url:
        page = await http.get(url, headers=bearer("vera"))
        found += [job["job"] for job in page.json()["jobs"]]
        pages += 1
        following = page.links.get("next", {}).get("url", "")
        assert bool(following) is (page.json()["next"] is not None)
        url = f"{gateway.url}{following}" if following else ""
    assert (found, pages) == (jobs, 3)
    assert (await http.get(f"{gateway.url}/v1/jobs?user=rob", headers=bearer("vera"))).json()["jobs"] == []
    wrong = await http.get(f"{gateway.url}/v1/jobs?cursor=x", headers=bearer("vera"))
    assert (wrong.status_code, wrong.json()["code"]) == (422, "bad_input")


async def test_clusters_instances_and_routes_as_the_registry_and_the_routers_have_them(
    gateways: Gateways, dial: Dial, registry: ServiceRegistry, smo: StandInOrchestrator
) -> None:
    gateway = await gateways.begin("east")
    bus = await dial("agent")
    for record in (instance("j-s0-r0"), instance("j-s1-r0", cluster="west"), instance("k-data-r0")):
        await bus.command(subjects.REGISTRATION, Registration(record=record), sid=record.sid)
    table = RouteTable(job="j", cluster="east", stage=1, revision=1, router="router-east", entries=())
    await bus.bucket(subjects.ROUTE_TABLE).put(table, job="j", cluster="east", stage=1)
    await eventually(lambda: len(gateway.follower.view.instances()) == 3)
    async with AsyncClient(gateway.url, token="vera") as client:
        assert [one.sid for one in await client.instances(job="j")] == ["j-s0-r0", "j-s1-r0"]
        assert [one.sid for one in await client.instances(cluster="west", state="active")] == ["j-s1-r0"]
        assert (await client.instance("gateway-east")).kind is EntityKind.GATEWAY
        east, west = await client.clusters()
        assert (east.cluster, east.services, east.instances, east.jobs) == (
            "east",
            ("gateway-east",),
            {"active": 2},
            ("j", "k"),
        )
        assert await client.cluster("west") == west
        assert await client.routes(job="j") == [table]
        assert await client.routes(job="k") == []
        assert (await client.ready()).ready


async def test_an_operator_strikes_an_instance_by_its_node_agent(
    gateways: Gateways, dial: Dial, http: httpx.AsyncClient, registry: ServiceRegistry
) -> None:
    gateway = await gateways.begin("east")
    bus = await dial("east-east-n1", EntityKind.CLUSTER)
    orders: list[Strike] = []

    async def strike(order: Strike, envelope: Envelope) -> Struck:
        orders.append(order)
        return Struck(
            agent="east-east-n1", sid=order.sid, incarnation=order.incarnation, fault=order.fault, pid=7
        )

    await bus.serve(subjects.STRIKE, strike, agent="east-east-n1")
    await bus.command(subjects.REGISTRATION, Registration(record=instance()), sid="j-s0-r0")
    await eventually(lambda: "j-s0-r0" in gateway.follower.view.records)
    async with AsyncClient(gateway.url, token="olga") as client:
        assert (await client.strike("j-s0-r0", "kill")).pid == 7
    assert [(order.fault, order.user, order.incarnation) for order in orders] == [("kill", "olga", "i1")]
    for user, body, status in (
        ("ruth", {"sid": "j-s0-r0", "fault": "kill"}, 403),
        ("olga", {"sid": "gateway-east", "fault": "kill"}, 404),
        ("olga", {"sid": "j-s0-r0", "fault": "kill", "incarnation": "i0"}, 409),
        ("olga", {"sid": "j-s0-r0", "fault": "melt"}, 422),
    ):
        answer = await http.post(f"{gateway.url}/v1/chaos/faults", json=body, headers=bearer(user))
        assert answer.status_code == status, answer.text
    assert len(orders) == 1
    told = {"victim": "gateway-east", "fault": "gateway"}
    for user, body, status in (
        ("vera", told, 403),
        ("olga", told, 202),
        ("olga", told | {"victim": ""}, 422),
    ):
        answer = await http.post(f"{gateway.url}/v1/chaos/outside", json=body, headers=bearer(user))
        assert answer.status_code == status, answer.text


# --- idempotency keys ---------------------------------------------------------------------------------------


async def test_the_same_key_is_the_same_job_at_every_gateway(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    east, west = await gateways.begin("east"), await gateways.begin("west")
    first = await submit(http, east, Idempotency_Key="k1")
    again = await submit(http, west, Idempotency_Key="k1")
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json()
    assert first.headers["location"] == again.headers["location"]
    assert len(smo.jobs) == 1
    other = JOB | {"name": "other"}
    reused = await http.post(f"{west.url}/v1/jobs", json=other, headers=bearer("ruth", Idempotency_Key="k1"))
    assert (reused.status_code, reused.json()["code"]) == (422, "idempotency_key_reused")
    theirs = await http.post(f"{west.url}/v1/jobs", json=JOB, headers=bearer("rob", Idempotency_Key="k1"))
    assert theirs.json()["job"] != first.json()["job"], "keys are of one user"
    assert (await submit(http, east)).json()["job"] != first.json()["job"]
    assert len(smo.jobs) == 3


async def test_a_key_outlives_its_gateway_and_failures_keep_nothing(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    gateway = await gateways.begin("east")
    begun, held = asyncio.Event(), asyncio.Event()
    job = (await submit(http, gateway)).json()["job"]

    async def hold(record: Any, envelope: Envelope) -> Any:
        begun.set()
        await held.wait()
        return smo.jobs[job]

    async def cancel(which: str, key: str) -> httpx.Response:
        url = f"{gateway.url}/v1/jobs/{which}/cancel"
        return await http.post(url, headers=bearer("olga", Idempotency_Key=key))

    smo.cancelling = hold
    first = asyncio.create_task(cancel(job, "k1"))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    meanwhile = await cancel(job, "k1")
    assert (meanwhile.status_code, meanwhile.json()["code"]) == (409, "in_progress")
    assert meanwhile.headers["retry-after"] == "1"
    held.set()
    assert (await first).status_code == 200
    assert (await cancel(job, "k1")).json() == (await first).json()

    smo.cancelling = None
    assert (await cancel("none", "k2")).status_code == 404
    assert (await cancel(job, "k2")).status_code == 200, "what failed left nothing, not even the path"

    # A gateway claimed the key, queued the job, and died before it could keep its answer.
    body = json.dumps(JOB).encode()
    claim = KeptAnswer(
        request=request_digest("POST", "/v1/jobs", "", body), gateway="gateway-gone", incarnation="g0"
    )
    await smo.bus.bucket(subjects.KEPT_ANSWER).create(claim, key=key_token("ruth", "k3"))
    headers = bearer("ruth", Idempotency_Key="k3")
    taken = [await http.post(f"{gateway.url}/v1/jobs", content=body, headers=headers) for _ in range(2)]
    assert [one.status_code for one in taken] == [201, 201]
    assert taken[0].json() == taken[1].json()
    assert smo.causes[-1] == f"key.{key_token('ruth', 'k3')}", "by which an orchestrator knows it again"


# --- limits -------------------------------------------------------------------------------------------------


async def test_one_identity_meets_its_limit_and_others_do_not(
    gateways: Gateways, http: httpx.AsyncClient
) -> None:
    slowly = RequestRate(per_s=0.01, burst=5)
    gateway = await gateways.begin("east", rate=slowly, unknown_rate=RequestRate(per_s=0.01, burst=4))
    url = f"{gateway.url}/v1/jobs"
    statuses = [await http.get(url, headers=bearer("ruth")) for _ in range(8)]
    # The first counts for the address: who she is was not known yet.
    assert [one.status_code for one in statuses] == [200] * 6 + [429] * 2
    assert statuses[1].headers["ratelimit-limit"] == "5"
    assert statuses[1].headers["ratelimit-remaining"] == "4"
    refused = statuses[-1]
    assert refused.headers["content-type"] == "application/problem+json"
    assert (refused.json()["code"], refused.json()["retryable"]) == ("rate_limited", True)
    assert int(refused.headers["retry-after"]) >= 1
    assert (await http.get(url, headers=bearer("rob"))).status_code == 200
    guesses = [(await http.get(url, headers=bearer(f"guess{n}"))).status_code for n in range(4)]
    assert guesses == [401, 401, 429, 429]
    assert (await http.get(f"{gateway.url}/healthz")).status_code == 200
    files = [await http.get(f"{gateway.url}/dashboard/") for _ in range(6)]  # as many as one who is known
    assert [one.status_code for one in files] == [200] * 5 + [429]


async def test_streams_are_bounded_by_identity_and_in_all(
    gateways: Gateways, http: httpx.AsyncClient
) -> None:
    gateway = await gateways.begin("east", events=EventsConfig(streams_each=1, streams=2))
    job = (await submit(http, gateway)).json()["job"]
    url = f"{gateway.url}/v1/jobs/{job}/events"
    async with contextlib.AsyncExitStack() as stack:
        for user in ("vera", "ruth"):
            opened = await stack.enter_async_context(http.stream("GET", url, headers=bearer(user)))
            assert opened.status_code == 200
            if user == "vera":
                second = await http.get(url, headers=bearer("vera"))
                assert (second.status_code, second.json()["code"]) == (429, "rate_limited")
        full = await http.get(url, headers=bearer("rob"))
        assert (full.status_code, full.json()["code"]) == (503, "overloaded")
        assert full.headers["retry-after"] == "5"
    await eventually(lambda: gateway.http is not None and gateway.http.hub.open == 0)


def held_cancellation(smo: StandInOrchestrator, job: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Whether it has begun, and whether it may go on."""
    begun, held = asyncio.Event(), asyncio.Event()

    async def hold(record: Any, envelope: Envelope) -> Any:
        begun.set()
        await held.wait()
        return smo.jobs[job]

    smo.cancelling = hold
    return begun, held


async def test_more_open_than_may_be_is_refused_before_it_is_begun(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    gateway = await gateways.begin("east", open_requests=1)
    job = (await submit(http, gateway)).json()["job"]
    begun, held = held_cancellation(smo, job)
    path = f"{gateway.url}/v1/jobs/{job}/cancel"
    waiting = asyncio.create_task(http.post(path, headers=bearer("ruth")))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    place = urlsplit(gateway.url or "")
    reader, writer = await asyncio.open_connection(place.hostname, place.port)

    async def answer_to(method: str, path: str) -> tuple[int, bytes]:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ruth\r\nContent-Length: 0\r\n\r\n"
        )
        writer.write(head.encode())
        told = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(told.split(b"content-length: ")[1].split(b"\r")[0])
        if told[9:12] == b"503":
            assert b"retry-after: 1\r\n" in told
        return int(told[9:12]), await reader.readexactly(length)

    # On one connection; probes are answered.
    for method in ("GET", "GET", "POST", "GET"):
        status, body = await answer_to(method, "/v1/jobs")
        assert (status, json.loads(body)["code"]) == (503, "overloaded")
        assert (await answer_to("GET", "/healthz"))[0] == 200
    held.set()
    assert (await waiting).status_code == 200
    assert (await answer_to("GET", "/v1/jobs"))[0] == 200
    writer.close()
    assert (await http.get(f"{gateway.url}/v1/jobs", headers=bearer("ruth"))).status_code == 200
    told = {(reading.metric.name, reading.labels): reading.value for reading in gateway.readings()}
    assert told["dmsc_http_refused_total", ("gateway-east", "open")] == 4
    assert told["dmsc_gateway_breaker_state", ("gateway-east", "orchestrator")] == 0


async def test_an_entity_that_does_not_answer_is_left_alone_for_a_while(
    dial: Dial, start: Start, authorizer: Authorizer
) -> None:
    from entities.gateway.operations.backends import Backends
    from schemas.gateway_api import JobQuery

    config = BreakerConfig(failures=2, open_s=0.2, longest_open_s=0.2)
    backends = Backends(await dial("gateway-east", EntityKind.GATEWAY), "gateway-east", config)

    async def ask() -> None:
        await backends.request(subjects.QUERY, JobQuery(job="j"), timeout_s=PATIENCE_S)

    for _ in range(2):
        with pytest.raises(Unavailable):
            await ask()
    with pytest.raises(Overloaded, match="the orchestrator has not answered for a while"):
        await ask()
    assert backends.state(EntityKind.ORCHESTRATOR) is BreakerState.OPEN
    smo = StandInOrchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR))
    await smo.serve()

    async def answered() -> bool:
        with contextlib.suppress(Overloaded):
            await ask()
            return True
        return False

    await eventually(answered)
    assert backends.state(EntityKind.ORCHESTRATOR) is BreakerState.CLOSED


async def test_what_an_entity_refuses_itself_is_no_outage(
    dial: Dial, start: Start, authorizer: Authorizer
) -> None:
    """One user who asks for plans again and again must not close the door for all others."""
    from entities.gateway.operations.backends import Backends
    from schemas.plans import MakePlan, PlanBody

    smo = await dial("orchestrator", EntityKind.ORCHESTRATOR)

    async def refuse(message: MakePlan, envelope: Envelope) -> None:
        raise Overloaded(f"{message.user} waits for a plan already", retry_after_s=5)

    await smo.serve(subjects.MAKE_PLAN, refuse)
    config = BreakerConfig(failures=2, open_s=60.0, longest_open_s=60.0)
    backends = Backends(await dial("gateway-east", EntityKind.GATEWAY), "gateway-east", config)
    question = MakePlan(question=PlanBody.model_validate({"job": JOB}), user="ada")
    for _ in range(5):
        with pytest.raises(Overloaded, match="ada waits for a plan already") as refused:
            await backends.command(subjects.MAKE_PLAN, question)
        assert refused.value.answered
    assert backends.state(EntityKind.ORCHESTRATOR) is BreakerState.CLOSED


# --- event streams ------------------------------------------------------------------------------------------


async def tell(smo: StandInOrchestrator, job: str, text: str) -> None:
    event = JobEvent(job=job, kind="sample", at=1.0, sample=text)
    await smo.bus.append(subjects.JOB_EVENT, event, job=job)


async def test_many_streams_of_a_job_share_one_consumer(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator, own_server: EmbeddedServer
) -> None:
    gateway = await gateways.begin("east")
    job = (await submit(http, gateway)).json()["job"]

    async def collect() -> list[str]:
        async with AsyncClient(gateway.url, token="vera") as client:
            return [event.sample or str(event.state) async for event in client.events(job)]

    collecting = [asyncio.create_task(collect()) for _ in range(20)]
    await eventually(lambda: gateway.http is not None and gateway.http.hub.open == 20)
    assert gateway.http is not None
    hub = gateway.http.hub
    await eventually(lambda: [subject.followers for subject in hub._hubs.values()] == [20])
    await tell(smo, job, "one")
    await smo.tell(job, JobState.DONE)
    for found in await asyncio.gather(*collecting):
        assert found == ["queued", "one", "done"]
    await eventually(lambda: not hub._hubs and hub.open == 0)


async def test_a_client_that_does_not_read_is_told_that_it_lagged_and_nobody_waits(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    bounds = EventsConfig(kept_lines=16, kept_bytes=1 << 20, read_lines=16, read_bytes=1 << 20)
    gateway = await gateways.begin("east", events=bounds)
    job = (await submit(http, gateway)).json()["job"]
    place = urlsplit(gateway.url or "")
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1024)
    head = f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer vera\r\n\r\n"
    writer.write(head.encode())
    await reader.readuntil(b"event: state")
    count, size = 100, 200_000  # far beyond what sockets hold
    for number in range(count):
        await asyncio.wait_for(tell(smo, job, f"{number:03d}" + "x" * size), PATIENCE_S)
    await smo.tell(job, JobState.DONE)
    got = bytearray()
    async with asyncio.timeout(PATIENCE_S):
        while b"event: lagged" not in got[-2000:]:
            piece = await reader.read(1 << 20)
            assert piece, "the stream ended without a word"
            got += piece
    writer.close()
    assert got.count(b"\nevent: sample") < count
    # Who comes back with the last id has all of it, in order.
    async with AsyncClient(gateway.url, token="vera") as client:
        last = int(json.loads(bytes(got).rsplit(b"event: lagged\ndata: ", 1)[1].split(b"\n")[0])["last"])
        rest = [event async for event in client.events(job, start=last + 1)]
        samples = [int((event.sample or "")[:3]) for event in rest if event.kind == "sample"]
        assert samples == list(range(samples[0], count))
        assert len(samples) + got.count(b"\nevent: sample") == count


async def test_streams_go_on_at_another_gateway_when_theirs_stops(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    east, west = await gateways.begin("east"), await gateways.begin("west")
    job = (await submit(http, east)).json()["job"]
    found: list[str] = []
    seen = asyncio.Event()

    async def collect() -> None:
        async with AsyncClient([east.url or "", west.url or ""], token="vera") as client:
            async for event in client.events(job):
                found.append(event.sample or str(event.state))
                seen.set()

    async def raw() -> str:
        async with http.stream("GET", f"{east.url}/v1/jobs/{job}/events", headers=bearer("rob")) as answer:
            return (await answer.aread()).decode()

    collecting, reading = asyncio.create_task(collect()), asyncio.create_task(raw())
    await asyncio.wait_for(seen.wait(), PATIENCE_S)
    await eventually(lambda: east.http is not None and east.http.hub.open == 2)
    await end(gateways.tasks["east"])
    text = await asyncio.wait_for(reading, PATIENCE_S)
    assert "event: closing" in text
    assert "retry: 200" in text
    await tell(smo, job, "later")
    await smo.tell(job, JobState.DONE)
    await asyncio.wait_for(collecting, PATIENCE_S)
    assert found == ["queued", "later", "done"]


async def test_what_is_open_is_answered_before_a_gateway_stops_and_nothing_new_is_begun(
    gateways: Gateways, http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    gateway = await gateways.begin("east", drain_s=30.0)
    job = (await submit(http, gateway)).json()["job"]
    begun, held = held_cancellation(smo, job)
    asked = asyncio.create_task(http.post(f"{gateway.url}/v1/jobs/{job}/cancel", headers=bearer("ruth")))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    stopping = asyncio.create_task(end(gateways.tasks["east"]))
    await eventually(lambda: gateway.http is not None and gateway.http.load.draining)
    refused = await http.get(f"{gateway.url}/v1/jobs", headers=bearer("ruth"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    unready = await http.get(f"{gateway.url}/readyz")
    assert (unready.status_code, unready.json()["waiting"]["gateway"]) == (503, "it stops")
    held.set()
    assert (await asked).status_code == 200
    await stopping
    with pytest.raises(httpx.ConnectError):
        await http.get(f"{gateway.url}/healthz")
