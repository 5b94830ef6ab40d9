"""SR against a real server: tables follow registry, policy and faults (draft §4.3 Types 2, 4, 5; §4.4)."""

from __future__ import annotations

from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from entities.presence.service_area import server_of
from entities.router.service import Router, RouterConfig
from entities.service_registry.service import ServiceRegistry
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind
from schemas.errors import Ack
from schemas.fault import LinkFault
from schemas.registry import Endpoint, InstanceState, ServiceRecord, StateChange
from schemas.signals import CommunicationPolicy, ComputeNotification, Registration, StagePolicy
from schemas.step import Member
from schemas.telemetry import InstanceSample
from tests.builders.records import instance, service
from tests.builders.routes import policy
from tests.builders.telemetry import compute
from tests.builders.telemetry import linked_sample as sample
from tests.integration.entities.conftest import Dial, Heard, Start, end
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually

S = InstanceState


class Agent:
    """Registers and moves instances, as a node agent does."""

    def __init__(self, bus: Bus, dial: Dial) -> None:
        self.bus = bus
        self._dial = dial
        self._instances: dict[str, Bus] = {}

    async def put(self, record: ServiceRecord) -> None:
        await self.bus.command(
            subjects.REGISTRATION, Registration(record=record), deadline_s=PATIENCE_S, sid=record.sid
        )

    async def move(self, sid: str, state: S, reason: str = "") -> None:
        change = StateChange(sid=sid, incarnation="i1", state=state, reason=reason)
        await self.bus.command(subjects.STATE_CHANGE, change, deadline_s=PATIENCE_S, sid=sid)

    async def sampled(self, told: InstanceSample) -> None:
        """Said by the instance itself: nobody else is believed."""
        if told.sid not in self._instances:
            self._instances[told.sid] = await self._dial(told.sid, EntityKind.INSTANCE)
        bus = self._instances[told.sid]
        await bus.publish(subjects.INSTANCE_SAMPLE, told, job=told.job, sid=told.sid)


@pytest.fixture
async def agent(dial: Dial, registry: ServiceRegistry) -> Agent:
    """The west has a router of its own, too."""
    agent = Agent(await dial("east-n1", EntityKind.CLUSTER), dial)
    await agent.put(distant_router("west"))
    return agent


def distant_router(cluster: str) -> ServiceRecord:
    place = Endpoint(cluster=cluster, node="n1")
    return service(f"router-{cluster}", incarnation="i1", kind=EntityKind.ROUTER, endpoint=place)


@pytest.fixture
async def router(dial: Dial, start: Start, registry: ServiceRegistry, smo: StandInOrchestrator) -> Router:
    service = Router(await dial("router-east", EntityKind.ROUTER), RouterConfig(cluster="east"))
    await start(service)
    return service


async def issue(smo: StandInOrchestrator, message: CommunicationPolicy) -> Ack:
    return await smo.send(message, "router-east")


async def table(bus: Bus, stage: int = 0, guests: tuple[str, ...] = (), **wanted: Any) -> RouteTable:
    """The cluster's table of a stage, once its entries' (SID → weight) and its guests are as wanted."""
    bucket = bus.bucket(subjects.ROUTE_TABLE)

    async def fitting() -> RouteTable | None:
        entry = await bucket.get(job="j", cluster="east", stage=stage)
        if entry is None:
            return None
        found = {e.sid: e.weight for e in entry.message.entries}
        fits = found == wanted["weights"] and entry.message.guests == guests
        return entry.message if fits else None

    found: RouteTable = await eventually(fitting)
    return found


async def test_it_registers_with_the_orchestrator_and_the_registry(
    router: Router, registry: ServiceRegistry, smo: StandInOrchestrator
) -> None:
    """Draft §4.4(1), §5.3."""
    await eventually(lambda: smo.nodes)
    node = smo.nodes[0]
    assert (node.sid, node.kind, node.endpoint.cluster) == ("router-east", "router", "east")
    record = registry.core.record("router-east")
    assert record is not None
    assert (record.prefix, record.state) == ("entity/router/east", S.ACTIVE)


async def test_the_table_follows_policy_and_faults(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    for sid, cluster in (("j-s0-r0", "east"), ("j-s0-r1", "west")):
        await agent.put(instance(sid, cluster=cluster))
    assert (await issue(smo, policy())).note == "adopted"
    first = await table(agent.bus, weights={"j-s0-r0": 1.0, "j-s0-r1": 1.0})
    assert (first.router, first.entries[0].window) == ("router-east", 4)

    weights = StagePolicy(stage=0, window=2, weights={"j-s0-r0": 0.2, "j-s0-r1": 0.8})
    await issue(
        smo, policy(revision=2, stages=(weights, StagePolicy(stage=1, window=4)), reason="r1 is faster")
    )
    second = await table(agent.bus, weights={"j-s0-r0": 0.2, "j-s0-r1": 0.8})
    assert second.revision == first.revision + 1
    assert "r1 is faster" in second.reason

    await agent.move("j-s0-r1", S.FAULTED, "signal 9")
    third = await table(agent.bus, weights={"j-s0-r0": 0.2})
    assert "j-s0-r1 faulted" in third.reason

    await agent.put(instance("j-s0-r1", cluster="west", incarnation="i2", state=S.PENDING))
    await agent.put(instance("j-s0-r1", cluster="west", incarnation="i2"))
    fourth = await table(agent.bus, weights={"j-s0-r0": 0.2, "j-s0-r1": 0.8})
    assert fourth.entries[1].incarnation == "i2"

    await agent.move("j-s0-r0", S.DRAINING)
    await table(agent.bus, weights={"j-s0-r0": 0.0, "j-s0-r1": 0.8})
    await table(agent.bus, stage=1, weights={})


async def test_a_table_is_not_rewritten_when_nothing_would_be_chosen_otherwise(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    await agent.put(instance("j-s0-r0"))
    await issue(smo, policy())
    written = await table(agent.bus, weights={"j-s0-r0": 1.0})
    await agent.put(instance("j-s0-r0", version="2"))
    await issue(smo, policy(revision=2))
    await agent.put(instance("j-s0-r1", state=S.PENDING))
    await agent.put(instance("k-s0-r0"))
    await eventually(lambda: "k-s0-r0" in router.follower.view.records)
    assert await table(agent.bus, weights={"j-s0-r0": 1.0}) == written


async def test_a_restarted_router_goes_on_from_what_stands_in_the_bucket(
    dial: Dial, start: Start, agent: Agent, smo: StandInOrchestrator
) -> None:
    await agent.put(instance("j-s0-r0"))
    first = await start(Router(await dial("router-east", EntityKind.ROUTER), RouterConfig(cluster="east")))
    await issue(smo, policy())
    await table(agent.bus, weights={"j-s0-r0": 1.0})
    await end(first)
    assert await table(agent.bus, weights={"j-s0-r0": 1.0}), "senders go on while the router is away"
    await start(Router(await dial("router-east", EntityKind.ROUTER), RouterConfig(cluster="east")))
    await issue(smo, policy())
    await agent.put(instance("j-s0-r1"))
    after = await table(agent.bus, weights={"j-s0-r0": 1.0, "j-s0-r1": 1.0})
    assert after.revision >= 2


async def test_samples_become_type_4_and_type_5(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    """Draft §4.3: load, heterogeneity and latency to the gateways; aggregates to the orchestrator."""
    compute = await Heard.on(agent.bus, subjects.COMPUTE)
    reports = await Heard.on(agent.bus, subjects.QOS_REPORT)
    await agent.put(instance("j-s0-r0"))
    await agent.put(instance("j-s0-r1", cluster="west"))
    await issue(smo, policy())
    await eventually(lambda: router._feed.followed == {("j", "j-s0-r0")})
    await agent.sampled(sample(queue=2))
    news = await compute.until(lambda message: any(e.service_ms > 0 for e in message.entries))
    (entry,) = news.entries
    assert (news.cluster, entry.sid, entry.queue, entry.service_ms, entry.latency_ms) == (
        "east",
        "j-s0-r0",
        2,
        5.0,
        2.0,
    )
    report = await reports.until(lambda message: message.throughput_tokens_per_s > 0)
    assert (report.sid, report.cluster, report.job, report.instances) == ("router-east", "east", "j", 1)
    assert (report.throughput_bytes_per_s, report.latency_ms) == (10_000, 2.0)


async def test_a_cluster_without_a_router_is_served_until_it_has_one(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    """ADR-0058. Of two routers the east's is the one for `new`, by name."""
    assert server_of("new", ("east", "west")) == "east"
    await agent.put(instance("j-s0-r0", cluster="new"))
    await issue(smo, policy())
    first = await table(agent.bus, weights={"j-s0-r0": 1.0}, guests=("new",))
    assert "also for new: no router there" in first.reason
    compute = await Heard.on(agent.bus, subjects.COMPUTE)
    await agent.sampled(sample(queue=2))
    news = await compute.until(lambda message: any(e.service_ms > 0 for e in message.entries))
    assert news.guests == ("new",)
    await agent.move("j-s0-r0", S.FAULTED)
    await eventually(lambda: [fault.sid for fault in smo.faults] == ["j-s0-r0"])
    await agent.put(distant_router("new"))
    await table(agent.bus, weights={})


async def test_what_was_measured_reaches_the_tables_and_other_clusters_figures_too(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    """Routers are linked (draft §3): what the west's router tells of its instances is in the east's table."""
    await agent.put(instance("j-s0-r0"))
    await agent.put(instance("j-s0-r1", cluster="west"))
    await issue(smo, policy(algorithm="power-of-two"))
    first = await table(agent.bus, weights={"j-s0-r0": 1.0, "j-s0-r1": 1.0})
    assert first.algorithm == "power-of-two"
    await eventually(lambda: router._feed.followed == {("j", "j-s0-r0")})
    await agent.sampled(sample(microbatches=1))
    told = ComputeNotification(
        router="router-west", cluster="west", revision=1, entries=(compute("j-s0-r1", service_ms=20.0),)
    )
    await agent.bus.publish(subjects.COMPUTE, told, cluster="west")

    async def measured() -> RouteTable | None:
        entry = await agent.bus.bucket(subjects.ROUTE_TABLE).get(job="j", cluster="east", stage=0)
        assert entry is not None
        return entry.message if entry.message.entries[1].service_ms else None

    written: RouteTable = await eventually(measured)
    assert [entry.service_ms for entry in written.entries] == [5.0, 20.0]
    assert written.revision == first.revision + 1
    assert "20.0 ms per microbatch, 1.6× the stage's median" in written.entries[1].reason


async def test_an_instance_that_becomes_slow_is_reported_with_the_figures(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    await agent.put(instance("j-s0-r0"))
    await agent.put(instance("j-s0-r1"))
    await issue(smo, policy())
    await eventually(lambda: router._feed.followed == {("j", "j-s0-r0"), ("j", "j-s0-r1")})
    for number, slow_ms in enumerate((50.0,) * 6 + (200.0,) * 3):
        for sid, ms in (("j-s0-r0", 50.0), ("j-s0-r1", slow_ms)):
            told = sample(sid, service_ms=ms, microbatches=number + 1)
            await agent.sampled(told)
    (fault,) = await eventually(lambda: smo.faults)
    assert (fault.sid, fault.kind, fault.reporter) == ("j-s0-r1", "slow", "router-east")
    assert "200.0 ms per microbatch, 4.0× its usual 50.0 ms" in fault.evidence


async def test_who_keeps_breaking_links_is_ejected_and_the_stage_keeps_working(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    for sid in ("j-s0-r0", "j-s0-r1"):
        await agent.put(instance(sid))
    await issue(smo, policy())
    await table(agent.bus, weights={"j-s0-r0": 1.0, "j-s0-r1": 1.0})
    for sid in ("j-s0-r0", "j-s0-r1"):
        for number in range(3):
            fault = LinkFault(
                job="j", reporter="j-data-r0", peer=sid, peer_incarnation="i1", text=f"{number}"
            )
            await agent.bus.publish(subjects.LINK_FAULT, fault, cluster="east", job=fault.job)
    ejected = await table(agent.bus, weights={"j-s0-r0": 0.0, "j-s0-r1": 1.0})
    assert "ejected: j-s0-r0" in ejected.reason
    assert "j-data-r0 lost its link to it" in ejected.entries[0].reason


async def test_faults_are_reported_once_per_incarnation(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    """Draft §4.4(5): "once a node or link fails, MG or SR will actively report the abnormal state to SMO"."""
    for sid, cluster in (("j-s0-r0", "east"), ("j-s0-r1", "west"), ("j-data-r0", "east")):
        await agent.put(instance(sid, cluster=cluster))
    for sid in ("j-s0-r1", "j-data-r0", "j-s0-r0"):
        await agent.move(sid, S.FAULTED, "signal 9")
    for _ in range(3):
        fault = LinkFault(
            job="j", reporter="j-s0-r0", peer="j-s1-r0", peer_incarnation="i1", text="connection reset"
        )
        await agent.bus.publish(subjects.LINK_FAULT, fault, cluster="east", job=fault.job)
    await eventually(lambda: len(smo.faults) >= 2)
    await agent.put(instance("j-s0-r0", incarnation="i2"))
    await eventually(lambda: router.follower.view.records["j-s0-r0"].incarnation == "i2")
    assert sorted((f.sid, f.kind, f.reporter) for f in smo.faults) == [
        ("j-s0-r0", "instance", "router-east"),
        ("j-s1-r0", "link", "router-east"),
    ], "the west's is its own router's, the data instance's is the gateway's"
    assert any("signal 9" in fault.evidence for fault in smo.faults)
    (reset,) = [fault for fault in smo.faults if "connection reset" in fault.evidence]
    # which start of it saw that, it does not say: so it is none that the orchestrator has
    assert reset.witness == Member(sid="j-s0-r0", incarnation="unknown")


async def test_a_fault_waits_for_an_absent_orchestrator(
    dial: Dial, start: Start, registry: ServiceRegistry, agent: Agent
) -> None:
    await start(Router(await dial("router-east", EntityKind.ROUTER), RouterConfig(cluster="east")))
    await agent.put(instance("j-s0-r0"))
    await agent.move("j-s0-r0", S.FAULTED)
    late = StandInOrchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR))
    await late.serve()
    await eventually(lambda: len(late.faults) == 1)


async def test_the_end_of_a_job_removes_its_tables_and_is_reported(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    """Draft §4.4(6): "MG and SR will report the status to SMO and SRD"."""
    reports = await Heard.on(agent.bus, subjects.TERMINATION)
    bucket = agent.bus.bucket(subjects.ROUTE_TABLE)
    await agent.put(instance("j-s0-r0"))
    await issue(smo, policy())
    await table(agent.bus, weights={"j-s0-r0": 1.0})
    assert (await issue(smo, policy(revision=2, ended=True))).note == "ended"
    report = await reports.until()
    assert (report.sid, report.job) == ("router-east", "j")
    assert await bucket.keys(job="j") == []
    await agent.move("j-s0-r0", S.DRAINING)
    assert (await issue(smo, policy(revision=1))).note == "older"
    assert await bucket.keys(job="j") == [], "a late policy brings nothing back"
    reports.clear()
    await issue(smo, policy(revision=2, ended=True))
    await reports.until()


async def test_an_older_policy_changes_nothing(
    router: Router, agent: Agent, smo: StandInOrchestrator
) -> None:
    await agent.put(instance("j-s0-r0"))
    await issue(smo, policy(revision=5, stages=(StagePolicy(stage=0, window=1, weights={"j-s0-r0": 0.5}),)))
    await table(agent.bus, weights={"j-s0-r0": 0.5})
    assert (await issue(smo, policy(revision=4))).note == "older"
    await table(agent.bus, weights={"j-s0-r0": 0.5})
