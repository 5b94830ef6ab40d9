"""A job's policies on their way to gateways and routers, some of which have just died."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from entities.orchestrator.job_state.ingress_gateway import (
    GatewayTimes,
    IngressGateway,
    in_order,
    next_entry,
)
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, Unavailable
from schemas.job import JobSpec
from schemas.job_file.model import ModelSpec
from schemas.job_file.training import TrainingSpec
from schemas.registry import Endpoint, InstanceState, ServiceRecord, service_tag
from schemas.signals import CommunicationPolicy, NodeRegistration
from schemas.task_graph import TaskGraph
from tests.builders.records import service
from tests.integration.entities.conftest import Dial

SPEC = JobSpec(name="job", model=ModelSpec(factory="tiny:model"), training=TrainingSpec(steps=1))


class Receiver:
    """A gateway or router that takes policies."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[CommunicationPolicy] = asyncio.Queue()

    async def serve(self, bus: Bus, sid: str) -> None:
        await bus.serve(subjects.QOS_POLICY, self._policy, sid=sid)

    async def _policy(self, message: CommunicationPolicy, envelope: Envelope) -> Ack:
        self.taken.put_nowait(message)
        return Ack()


async def register(mesh: MeshView, *sids: str) -> None:
    for sid in sids:
        kind = EntityKind(sid.split("-")[0])
        endpoint = Endpoint(cluster=sid[-1], node="n")
        await mesh.service(NodeRegistration(sid=sid, kind=kind, incarnation="i", endpoint=endpoint))


async def say(text: str) -> None:
    raise AssertionError(f"nothing was to be said: {text}")


def store(say: Callable[[str], Awaitable[None]]) -> Any:
    """The job's store, as far as it is told what the job waits for."""

    async def tell(kind: str, *, text: str) -> None:
        assert kind == "recovery"
        await say(text)

    return SimpleNamespace(job="j", record=SimpleNamespace(spec=SPEC, graph=None), tell=tell)


def graph() -> TaskGraph:
    return TaskGraph(
        units=(), edges=(), constraints=(), placements=(), reason="", code_digest="", layer_count=0
    )


async def test_a_dead_router_holds_up_nobody_and_hears_of_it_when_it_is_back(dial: Dial) -> None:
    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    mesh = MeshView()
    await register(mesh, "gateway-a", "router-a", "router-b")
    gateway, router = Receiver(), Receiver()
    await gateway.serve(await dial("gateway-a", EntityKind.GATEWAY), "gateway-a")
    communication = PolicyDistribution(orchestrator, mesh)
    entry = IngressGateway(mesh, communication, store(say), "gateway-a")
    try:
        await entry.choose(graph())
        assert entry.sid == "gateway-a"
        first = await gateway.taken.get()
        assert communication.revise("more to one", weights=(0, {})) == first.revision + 1
        assert (await gateway.taken.get()).reason == "more to one"  # with the first one still on its way
        await router.serve(await dial("router-b", EntityKind.ROUTER), "router-b")
        assert (await router.taken.get()).reason == "more to one"  # and nothing older
        assert router.taken.empty()
        with pytest.raises(Unavailable, match="router-a did not take the policy of job j"):
            await communication.acknowledged("router-a", 0.1)
    finally:
        await communication.close()


async def test_the_job_goes_to_another_gateway_when_its_own_is_dead_with_others(dial: Dial) -> None:
    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    mesh = MeshView()
    await register(mesh, "gateway-a", "gateway-b", "gateway-c", "router-a")
    gateways = {sid: Receiver() for sid in ("gateway-a", "gateway-c")}
    served = {sid: await dial(sid, EntityKind.GATEWAY) for sid in gateways}
    for sid, receiver in gateways.items():
        await receiver.serve(served[sid], sid)
    communication = PolicyDistribution(orchestrator, mesh)
    entry = IngressGateway(mesh, communication, store(say), "gateway-a")
    try:
        await entry.choose(graph())
        assert (await gateways["gateway-c"].taken.get()).entry_gateway == "gateway-a"
        await served["gateway-a"].close()
        await entry.leave("gateway-a")  # gateway-b, the next by name, is dead too
        assert entry.sid == "gateway-c"
        while (policy := await gateways["gateway-c"].taken.get()).entry_gateway != "gateway-c":
            pass
        assert policy.reason == "gateway gateway-b does not answer"
        await entry.leave("gateway-a")  # told late: there is another one already
        assert entry.sid == "gateway-c"
    finally:
        await communication.close()


async def test_a_job_without_a_gateway_waits_for_one_and_says_so(dial: Dial) -> None:
    times = GatewayTimes(quiet_s=0.01)
    said: asyncio.Queue[str] = asyncio.Queue()
    mesh = MeshView()
    communication = PolicyDistribution(await dial("orchestrator", EntityKind.ORCHESTRATOR), mesh)
    entry = IngressGateway(mesh, communication, store(said.put), "gateway-a", times)
    choosing = asyncio.create_task(entry.choose(graph()))
    try:
        assert await said.get() == "waits for a gateway: none is registered"
        assert not choosing.done()
        gateway = Receiver()
        await gateway.serve(await dial("gateway-b", EntityKind.GATEWAY), "gateway-b")
        await register(mesh, "gateway-b")
        await choosing
        assert entry.sid == "gateway-b"
        assert await said.get() == "goes on: gateway gateway-b dispatches for it"
        assert said.empty()
    finally:
        choosing.cancel()
        await communication.close()


async def test_a_job_without_a_router_waits_for_one_and_says_so(dial: Dial) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    mesh = MeshView()
    communication = PolicyDistribution(await dial("orchestrator", EntityKind.ORCHESTRATOR), mesh)
    entry = IngressGateway(mesh, communication, store(said.put), "gateway-a", GatewayTimes(quiet_s=0.01))
    waiting = asyncio.create_task(entry.until_routed())
    try:
        assert await said.get() == "waits for a router: none is registered; `dmsc run router` starts one"
        assert not waiting.done()
        await register(mesh, "router-b")
        await waiting
        assert await said.get() == "goes on: router router-b routes for it"
        await entry.until_routed()
        assert said.empty()
    finally:
        waiting.cancel()
        await communication.close()


def test_the_next_entry_is_the_preferred_then_the_first_that_is_not_silent() -> None:
    three = ["gateway-a", "gateway-b", "gateway-c"]
    assert next_entry(three, "gateway-b", set()) == "gateway-b"
    assert next_entry(three, "gateway-b", {"gateway-b"}) == "gateway-a"
    assert next_entry(three, "", {"gateway-a"}) == "gateway-b"
    assert next_entry(three, "gateway-a", set(three)) is None


def test_gateways_are_found_by_content_and_those_near_the_data_come_first() -> None:
    """Draft §1: taking the tag or the state away changes the choice."""

    def record(cluster: str, **more: Any) -> ServiceRecord:
        place = Endpoint(cluster=cluster, node="n")
        fields = {"prefix": f"entity/gateway/{cluster}", "endpoint": place, "tags": (service_tag("entry"),)}
        return service(f"gateway-{cluster}", **(fields | more))

    three = ["gateway-a", "gateway-b", "gateway-c"]
    records = {f"gateway-{cluster}": record(cluster) for cluster in "abc"}
    assert in_order(three, records, {"b"}) == ["gateway-b", "gateway-a", "gateway-c"]
    assert in_order(three, records | {"gateway-b": record("b", tags=())}, {"b"})[-1] == "gateway-b"
    leaving = record("b", state=InstanceState.DRAINING)
    assert in_order(three, records | {"gateway-b": leaving}, {"b"})[0] == "gateway-a"
    assert in_order(three, {}, {"b"}) == three, "records that have not arrived exclude nobody"
