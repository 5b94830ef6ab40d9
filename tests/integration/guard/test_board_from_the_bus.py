"""`dmsc top` and `dmsc routes` where no gateway answers: a viewer reads a guarded bus."""

from __future__ import annotations

import asyncio
import time

import pytest

from bus import subjects
from bus.connection import Bus
from dmsc.board.documents import LINKS_PARTS, TOP_PARTS, Overview, routes_document, top_document
from dmsc.board.overview import NO_GATEWAY, MeshAddresses, OverviewReader
from entities.gateway.dashboard.view_model import OverviewPart
from schemas.data_plane import RouteEntry, RouteTable
from schemas.envelope import EntityKind
from schemas.errors import Unavailable
from schemas.job import JobEvent, StepResult
from schemas.signals import Role
from schemas.telemetry import LinkFigures, LinkSample, NodeSample
from tests.builders.jobs import job
from tests.builders.records import instance
from tests.builders.telemetry import linked_sample as sample
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.patience import PATIENCE_S

JOB = "tiny-1"
SENDER, RECEIVER = f"{JOB}-s0-r0", f"{JOB}-s1-r0"
NO_GATEWAY_THERE = "http://127.0.0.1:9"
"""The port of `discard`, where nobody listens."""


def table() -> RouteTable:
    entry = RouteEntry(sid=SENDER, incarnation="i1", cluster="east", weight=0.5, window=4, reason="2x slower")
    return RouteTable(job=JOB, cluster="east", stage=0, revision=3, router="router-east", entries=(entry,))


def step() -> JobEvent:
    result = StepResult(
        step=4,
        loss=2.5,
        gradient_norm=1.0,
        learning_rate=1e-3,
        tokens=80,
        step_s=0.4,
        tokens_per_s=200.0,
        shares={SENDER: 3},
    )
    return JobEvent(job=JOB, kind="step", at=time.time(), result=result)


async def keep_state(mesh: Guarded) -> None:
    """What the registry, the orchestrator and a router have kept."""
    async with Bus.connect(
        mesh.url, name="service-registry", kind=EntityKind.SERVICE_REGISTRY, token=mesh.root
    ) as registry:
        for record in (instance(SENDER), instance(RECEIVER)):
            await registry.bucket(subjects.REGISTRY_RECORD).put(record, sid=record.sid)
    async with Bus.connect(
        mesh.url, name="orchestrator", kind=EntityKind.ORCHESTRATOR, token=mesh.root
    ) as orchestrator:
        await orchestrator.bucket(subjects.JOB_RECORD).put(job(JOB), job=JOB)
        await orchestrator.append(subjects.JOB_EVENT, step(), job=JOB)
    async with Bus.connect(mesh.url, name="router-east", kind=EntityKind.ROUTER, token=mesh.root) as router:
        await router.bucket(subjects.ROUTE_TABLE).put(table(), job=JOB, cluster="east", stage=0)


async def report(mesh: Guarded) -> None:
    """One sample of an instance and of its node."""
    figures = LinkFigures(latency_ms=1.5, transfer_ms=2.5, bytes=9000, trend="steady")
    links = (LinkSample(peer=RECEIVER, sent_bytes=9000, transfers=3, transfer_ms=6.0, figures=figures),)
    async with Bus.connect(mesh.url, name=SENDER, kind=EntityKind.INSTANCE, token=mesh.root) as sender:
        told = sample(SENDER, busy=0.75, queue=2, links=links)
        await sender.publish(subjects.INSTANCE_SAMPLE, told, job=JOB, sid=SENDER)
    async with Bus.connect(mesh.url, name="east-n1", kind=EntityKind.CLUSTER, token=mesh.root) as agent:
        node = NodeSample(cluster="east", node="east-n1", cpu=0.5, memory_used_bytes=1, memory_total_bytes=4)
        await agent.publish(subjects.NODE_SAMPLE, node, agent="east-n1")


async def read_all(mesh: Guarded, parts: tuple[OverviewPart, ...], *sampled: str) -> Overview:
    """The overview, as a viewer reads it from the bus, once samples have filled the parts `sampled`."""
    addresses = MeshAddresses(
        gateway=NO_GATEWAY_THERE, token="any", bus=mesh.url, bus_token=TOKENS[Role.VIEWER]
    )
    async with asyncio.timeout(PATIENCE_S), OverviewReader(addresses, parts) as reader:
        overview = await reader.read()  # it listens from now on
        await report(mesh)
        while not all(overview[part] for part in sampled):
            await asyncio.sleep(0.01)
            overview = await reader.read()
        return overview


async def test_a_viewer_sees_all_of_top_without_a_gateway(mesh: Guarded) -> None:
    await keep_state(mesh)
    overview = await read_all(mesh, TOP_PARTS, "nodes", "traffic")
    assert overview["trouble"] == {"gateway": NO_GATEWAY}
    document = top_document(overview)
    (line,) = document["jobs"]
    assert (line["job"], line["state"], line["step"], line["steps"]) == (JOB, "running", 5, 2)
    assert (line["loss"], line["tokens_per_s"]) == (2.5, 200.0)
    (node,) = document["nodes"]
    assert (node["node"], node["cpu"], node["memory"], node["instances"]) == ("east-n1", 0.5, 0.25, 2)
    sender, receiver = document["instances"]
    assert (sender["sid"], sender["busy"], sender["queue"], sender["share"]) == (SENDER, 0.75, 2, 1.0)
    assert (sender["sent_bytes"], sender["transfer_ms"]) == (9000, 2.0)
    assert (receiver["sid"], receiver["busy"]) == (RECEIVER, None)


async def test_a_viewer_sees_routes_and_links_without_a_gateway(mesh: Guarded) -> None:
    await keep_state(mesh)
    document = routes_document(await read_all(mesh, LINKS_PARTS, "links"), JOB)
    (stage,) = document["stages"]
    assert stage["tables"] == {"east": table().model_dump(mode="json")}
    (hop,) = stage["instances"]
    assert (hop["weights"], hop["reasons"]) == ({"east": 0.5}, {"east": "2x slower"})
    assert (hop["share"], hop["queue"], hop["state"]) == (1.0, 2, "active")
    (link,) = document["links"]
    assert (link["sender"], link["receiver"], link["stage"]) == (SENDER, RECEIVER, 1)
    assert (link["latency_ms"], link["beside_ms"], link["share"]) == (1.5, 0.0, 1.0)


async def test_where_nothing_says_where_the_bus_is_the_gateway_is_what_is_missed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DMSC_BUS", raising=False)
    monkeypatch.setenv("DMSC_STATE", str(tmp_path))
    async with OverviewReader(MeshAddresses(gateway=NO_GATEWAY_THERE), TOP_PARTS) as reader:
        with pytest.raises(Unavailable, match="no gateway answers at"):
            await reader.read()
