"""A process's metrics: at its own port, and at a gateway's door with a token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bus import subjects
from bus.mesh.registration import RegistrationClient
from dmsc.metrics import exposition as pages
from dmsc.metrics.exposition import Exposition
from dmsc.metrics.listener import MetricsOptions, listening
from entities import metrics as m
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.router.service import Router, RouterConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind
from schemas.signals import Registration
from schemas.telemetry import InstanceSample
from tests.builders.records import instance, service
from tests.builders.routes import policy
from tests.builders.telemetry import linked_sample as sample
from tests.integration.entities.conftest import Dial, Start
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually

Table = dict[str, dict[tuple[tuple[str, str], ...], float]]


def parse(page: str) -> Table:
    found: Table = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    return found


async def scrape(url: str, token: str | None = None) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.get(url, headers={} if token is None else {"Authorization": f"Bearer {token}"})


async def test_a_router_tells_its_clusters_instances_until_their_job_ends(
    dial: Dial, start: Start, registry: ServiceRegistry, smo: StandInOrchestrator
) -> None:
    bus = await dial("router-east", EntityKind.ROUTER)
    router = Router(bus, RouterConfig(cluster="east"))
    exposition = Exposition()
    exposition.add(bus, router)
    await start(router)
    agent = await dial("east-n1", EntityKind.CLUSTER)
    near, far = [await dial(sid, EntityKind.INSTANCE) for sid in ("j-s0-r0", "j-s0-r1")]
    for sid, cluster in (("j-s0-r0", "east"), ("j-s0-r1", "west")):
        record = Registration(record=instance(sid, cluster=cluster))
        await agent.command(subjects.REGISTRATION, record, deadline_s=PATIENCE_S, sid=sid)
    await smo.send(policy(), "router-east")

    async with listening(MetricsOptions(), exposition.render) as url:

        async def sampled() -> Table | None:
            message: InstanceSample = sample(queue=2)
            await near.publish(subjects.INSTANCE_SAMPLE, message, job="j", sid="j-s0-r0")
            await far.publish(
                subjects.INSTANCE_SAMPLE, sample("j-s0-r1", cluster="west"), job="j", sid="j-s0-r1"
            )
            found = parse((await scrape(url)).text)
            return found if "dmsc_instance_queue_microbatches" in found else None

        found: Table = await eventually(sampled)
        labels = (("cluster", "east"), ("job", "j"), ("sid", "j-s0-r0"), ("stage", "0"))
        assert found["dmsc_instance_queue_microbatches"] == {labels: 2}  # the other is of another cluster
        assert found["dmsc_instance_sent_bytes_total"][labels] >= 10_000
        assert sum(found["dmsc_route_changes_total"].values()) >= 1
        assert found["dmsc_bus_round_trip_seconds"][("service", "router-east"),] > 0
        assert found["process_resident_memory_bytes"][()] > 0
        await smo.send(policy(revision=2, ended=True), "router-east")
        after = parse((await scrape(url)).text)
        assert [name for name, rows in after.items() if any(("job", "j") in row for row in rows)] == []


async def test_the_door_tells_them_to_those_who_may_and_where_there_are_more(
    dial: Dial,
    start: Start,
    registry: ServiceRegistry,
    smo: StandInOrchestrator,
    authorizer: Authorizer,
) -> None:
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    bus.metrics_url = "http://10.0.0.1:9464/metrics"
    gateway = Gateway(bus, GatewayConfig(cluster="east", http_port=0))
    exposition = Exposition()
    assert isinstance(gateway, m.Scraped)
    gateway.exposition = exposition.render
    exposition.add(bus, gateway)
    await start(gateway)
    agent = await dial("n", EntityKind.CLUSTER)
    agent.metrics_url = "http://10.0.0.2:9464/metrics"
    async with RegistrationClient(agent, service("east-n1", kind=EntityKind.CLUSTER)):
        assert (await scrape(f"{gateway.url}/metrics")).status_code == 401
        assert (await scrape(f"{gateway.url}/metrics", "nobody")).status_code == 401
        page = await scrape(f"{gateway.url}/metrics", "vera")
        assert page.headers["content-type"].startswith("text/plain; version=")
        found = parse(page.text)
        assert found["dmsc_http_requests_total"][("gateway", "gateway-east"), ("status", "401")] == 2

        async def listed() -> list[dict[str, object]] | None:
            found: list[dict[str, object]] = (
                await scrape(f"{gateway.url}/v1/metrics/targets", "vera")
            ).json()
            return found if len(found) == 2 else None

        assert await eventually(listed) == [
            {"targets": ["10.0.0.1:9464"], "labels": {"node": "mesh", "services": "gateway-east"}},
            {"targets": ["10.0.0.2:9464"], "labels": {"node": "n1", "services": "east-n1"}},
        ]


async def test_what_is_no_scrape_and_a_port_that_is_taken(tmp_path: Path) -> None:
    exposition = Exposition()
    async with (
        listening(MetricsOptions(), exposition.render) as url,
        listening(MetricsOptions(port=int(url.split(":")[2].split("/")[0])), exposition.render) as other,
    ):
        assert other != url  # it is another port then: no service fails for that
        assert "dmsc_log_lines_dropped_total" in (await scrape(other)).text
        root = url.removesuffix("/metrics")
        assert (await scrape(f"{root}/else")).status_code == 404
        health = await scrape(f"{root}/healthz")
        assert (health.status_code, health.text) == (200, "ok\n")
        host, port = root.removeprefix("http://").split(":")
        for line in (b"POST /metrics HTTP/1.1\r\n\r\n", b"x" * 40_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(line)
            answer = await reader.read()
            assert answer.startswith((b"HTTP/1.1 405", b"HTTP/1.1 431"))
            writer.close()
        async with httpx.AsyncClient() as client:
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            page = await client.get(url, headers=accept)
        assert page.headers["content-type"].startswith("application/openmetrics-text")
        assert page.text.endswith("# EOF\n")


async def test_a_page_is_bounded(monkeypatch: pytest.MonkeyPatch, dial: Dial) -> None:
    class Many:
        def readings(self) -> list[m.MetricReading]:
            return [m.JOB_STEP(number, job=f"j{number}") for number in range(500)]

    monkeypatch.setattr(pages, "MOST_SERIES", 100)
    exposition = Exposition()
    exposition.add(await dial("many", EntityKind.ORCHESTRATOR), Many())
    body, _ = await exposition.render("")
    found = parse(body.decode())
    assert sum(len(rows) for name, rows in found.items() if name.startswith("dmsc_")) == 101
    assert found["dmsc_metrics_series_left_out"][()] > 400
