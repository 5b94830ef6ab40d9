"""MG at work in a step (draft §4.4(2), (3), (5), (6)): Type 4 decides the entry; faults, quality, end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from bus import subjects
from bus.connection import Bus
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.dispatch.dispatcher import DispatcherConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadData, Fenced, Unavailable
from schemas.registry import Endpoint, InstanceState, StateChange, TensorSchema
from schemas.signals import ComputeEntry, ComputeNotification, Registration
from schemas.step import Member, MicrobatchClaim, MicrobatchDispatch, StepBegin
from tests.builders.records import instance, service
from tests.builders.routes import policy
from tests.builders.telemetry import compute
from tests.builders.telemetry import linked_sample as sample
from tests.integration.entities.conftest import Dial, Heard, Start
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import eventually

S = InstanceState
DISPATCH = DispatcherConfig(deadline_s=1.0, entry_wait_s=0.5)


class StandInData:
    """A data instance that takes microbatches and makes none. `fault`: what it does instead of answering."""

    def __init__(self, bus: Bus, cluster: str = "east") -> None:
        self.bus = bus
        self.cluster = cluster
        self.sid = bus.sender.name
        self.taken: list[MicrobatchDispatch] = []
        self.fault: Exception | asyncio.Event | None = None
        self.faults_fired = 0

    async def join(self) -> None:
        await self.bus.serve(subjects.STEP_DISPATCH, self._take, job="j", sid=self.sid)
        await self.register()

    async def register(self, state: S = S.ACTIVE, batch: tuple[TensorSchema, ...] = ()) -> None:
        record = instance(
            self.sid, cluster=self.cluster, incarnation=self.bus.sender.incarnation, state=state
        ).model_copy(update={"output_schema": batch})
        await self.bus.command(
            subjects.REGISTRATION, Registration(record=record), deadline_s=PATIENCE_S, sid=self.sid
        )

    async def move(self, state: S) -> None:
        change = StateChange(sid=self.sid, incarnation=self.bus.sender.incarnation, state=state)
        await self.bus.command(subjects.STATE_CHANGE, change, deadline_s=PATIENCE_S, sid=self.sid)

    def numbers(self) -> list[int]:
        return [number for message in self.taken for number in message.microbatches]

    async def _take(self, message: MicrobatchDispatch, envelope: Envelope) -> Ack:
        if isinstance(self.fault, asyncio.Event):
            self.faults_fired += 1
            await self.fault.wait()
        elif self.fault is not None:
            self.faults_fired += 1
            raise self.fault
        self.taken.append(message)
        return Ack()

    async def claim(self, microbatch: int) -> None:
        sid = self.bus.sender.name
        owner = Member(sid=sid, incarnation=self.bus.sender.incarnation)
        key = {"epoch": 1, "step": 0, "attempt": 0, "stage": -1}
        claim = MicrobatchClaim(job="j", microbatch=microbatch, owner=owner, upstream="data", **key)
        await self.bus.publish(subjects.STEP_CLAIM, claim, job="j", sid=sid)


Data = tuple[StandInData, StandInData]


@pytest.fixture
async def gateway(dial: Dial, start: Start, registry: ServiceRegistry, smo: StandInOrchestrator) -> Gateway:
    service = Gateway(
        await dial("gateway-east", EntityKind.GATEWAY), GatewayConfig(cluster="east", dispatch=DISPATCH)
    )
    await start(service)
    return service


@pytest.fixture
async def data(dial: Dial, gateway: Gateway) -> Data:
    """One data instance in each of two clusters, seen by the gateway. The west has a gateway of its own."""
    place = Endpoint(cluster="west", node="n1")
    other = service("gateway-west", kind=EntityKind.GATEWAY, endpoint=place)
    bus = await dial("gateway-west", EntityKind.GATEWAY)
    await bus.command(
        subjects.REGISTRATION, Registration(record=other), deadline_s=PATIENCE_S, sid="gateway-west"
    )
    east = StandInData(await dial("j-data-r0", EntityKind.INSTANCE), "east")
    west = StandInData(await dial("j-data-r1", EntityKind.INSTANCE), "west")
    for one in (east, west):
        await one.join()
    await eventually(lambda: len(gateway.follower.view.active(job="j", stage=-1)) == 2)
    return east, west


async def begin(smo: StandInOrchestrator, microbatches: Iterable[int] = range(8), **key: int) -> Ack:
    fields = {"epoch": 1, "step": 0, "attempt": 0} | key
    message = StepBegin(job="j", microbatches=tuple(microbatches), **fields)
    answer = await smo.bus.command(
        subjects.STEP_BEGIN, message, deadline_s=PATIENCE_S, job="j", gateway="gateway-east"
    )
    assert isinstance(answer, Ack)
    return answer


async def test_a_unit_that_registered_other_batches_than_the_plans_gets_none(
    smo: StandInOrchestrator, gateway: Gateway, data: Data
) -> None:
    """Draft §1: the registry is asked by schema. Without one in the policy both get some."""
    east, west = data
    batch, other = (
        (TensorSchema(shape=(4, 17), dtype="int64"),),
        (TensorSchema(shape=(4, 33), dtype="int64"),),
    )
    await east.register(batch=batch)
    await west.register(batch=other)
    await eventually(
        lambda: (
            {each.output_schema for each in gateway.follower.view.active(job="j", stage=-1)} == {batch, other}
        )
    )
    await begin(smo)
    assert east.taken
    assert west.taken
    west.taken.clear()
    assert (await smo.send(policy(entry_schema=batch), "gateway-east")).note == "adopted"
    await begin(smo, step=1)
    assert next(message for message in east.taken if message.step == 1).microbatches == tuple(range(8))
    assert west.taken == []


async def notify(bus: Bus, gateway: Gateway, cluster: str, *entries: ComputeEntry) -> None:
    message = ComputeNotification(router=f"router-{cluster}", cluster=cluster, revision=1, entries=entries)
    await bus.publish(subjects.COMPUTE, message, cluster=cluster)
    await eventually(lambda: gateway._last_compute().get(cluster) == entries)


async def test_a_step_reaches_each_data_instance_once(smo: StandInOrchestrator, data: Data) -> None:
    """Draft §4.4(2): "MG is mainly responsible for the data entry"."""
    east, west = data
    answer = await begin(smo)
    assert answer.note == "j-data-r0: 4, j-data-r1: 4"
    assert sorted(east.numbers() + west.numbers()) == list(range(8))
    assert [(m.epoch, m.step, m.attempt, m.evaluate) for m in east.taken] == [(1, 0, 0, False)]


async def test_type_4_changes_the_choice(gateway: Gateway, smo: StandInOrchestrator, data: Data) -> None:
    """Draft §4.3 Type 4: load, heterogeneity and latency decide the path."""
    east, west = data
    await notify(smo.bus, gateway, "east", compute("j-s0-r0", service_ms=15.0))
    await notify(smo.bus, gateway, "west", compute("j-s0-r1", service_ms=5.0))
    await begin(smo, step=0)
    assert (len(east.numbers()), len(west.numbers())) == (2, 6)
    await notify(smo.bus, gateway, "west", compute("j-s0-r1", service_ms=5.0, queue=16))
    await begin(smo, step=1)
    assert (len(east.numbers()), len(west.numbers())) == (2 + 6, 6 + 2)
    await notify(smo.bus, gateway, "west", compute("j-s0-r1", state=S.FAULTED, weight=0.0))
    await begin(smo, step=2)
    assert len(east.taken[2].microbatches) == 8


async def test_the_same_step_again_dispatches_nothing_twice(smo: StandInOrchestrator, data: Data) -> None:
    east, west = data
    await asyncio.gather(*(begin(smo) for _ in range(5)))
    await begin(smo, range(10))
    assert sorted(east.numbers() + west.numbers()) == list(range(10)), "only 8 and 9 were new"
    await begin(smo, attempt=1)
    assert len(east.numbers() + west.numbers()) == 18, "a new attempt is a new dispatch"


async def test_a_silent_data_instance_is_reported_and_stays_bound(
    gateway: Gateway, smo: StandInOrchestrator, data: Data
) -> None:
    """Draft §4.4(5). Handing its microbatches to another could have two make them: only the SMO may."""
    east, west = data
    west.fault = asyncio.Event()
    with pytest.raises(Unavailable):
        await begin(smo)
    assert west.faults_fired == 1
    await eventually(lambda: smo.faults)
    (fault,) = smo.faults
    assert (fault.sid, fault.kind, fault.incarnation) == ("j-data-r1", "request", west.bus.sender.incarnation)
    assert "step 0 attempt 0" in fault.evidence
    west.fault.set()
    west.fault = None
    await begin(smo)
    assert sorted(east.numbers()) == [0, 2, 4, 6], "what was acknowledged is not told again"
    assert set(west.numbers()) == {1, 3, 5, 7}


async def test_a_higher_attempt_ends_the_one_under_way(smo: StandInOrchestrator, data: Data) -> None:
    _, west = data
    west.fault = asyncio.Event()
    older = asyncio.create_task(begin(smo))
    await eventually(lambda: west.faults_fired == 1)
    west.fault, held = None, west.fault
    await begin(smo, attempt=1)
    with pytest.raises(Fenced, match="superseded"):
        await older
    with pytest.raises(Fenced, match="superseded"):
        await begin(smo, attempt=0, microbatches=(99,))
    await begin(smo, step=3, attempt=2)
    with pytest.raises(Fenced, match="older than attempt 2"):
        await begin(smo, step=3, attempt=1)
    await begin(smo, step=5, epoch=2)
    with pytest.raises(Fenced):
        await begin(smo, step=6, epoch=1)
    held.set()


async def test_a_data_error_is_passed_on_and_is_no_fault(smo: StandInOrchestrator, data: Data) -> None:
    data[0].fault = BadData("file:///corpus: is gone")
    with pytest.raises(BadData, match="is gone"):
        await begin(smo)
    assert data[0].faults_fired == 1
    assert smo.faults == []


async def test_without_a_data_instance_it_waits_a_little_and_says_so(
    dial: Dial, gateway: Gateway, smo: StandInOrchestrator
) -> None:
    with pytest.raises(Unavailable, match="no active data instance"):
        await begin(smo)
    late = StandInData(await dial("j-data-r0", EntityKind.INSTANCE))
    step = asyncio.create_task(begin(smo))
    await late.join()
    await step
    assert late.numbers() == list(range(8))


async def test_a_faulted_data_instance_of_its_cluster_is_reported_once(
    gateway: Gateway, smo: StandInOrchestrator, data: Data
) -> None:
    east, west = data
    await west.move(S.FAULTED)
    await east.move(S.FAULTED)
    await eventually(lambda: smo.faults)
    await eventually(lambda: not gateway.follower.view.active(job="j", stage=-1))
    assert [(f.sid, f.kind, f.reporter) for f in smo.faults] == [("j-data-r0", "instance", "gateway-east")]


async def test_it_aggregates_its_cluster_and_reports_each_second(
    gateway: Gateway, smo: StandInOrchestrator, data: Data
) -> None:
    """Draft §4.4(2) "aggregation within the module", (3) "continuously report communication indicators"."""
    east, _ = data
    reports = await Heard.on(smo.bus, subjects.QOS_REPORT)
    assert (await smo.send(policy(), "gateway-east")).note == "adopted"
    await eventually(lambda: gateway._claims.followed == {("j", "j-data-r0")})
    await begin(smo)
    for number in range(3):
        await east.claim(number)
    await east.bus.publish(subjects.INSTANCE_SAMPLE, sample("j-data-r0"), job="j", sid="j-data-r0")
    report = await reports.until(lambda message: message.throughput_tokens_per_s > 0)
    assert (report.sid, report.cluster, report.job, report.instances) == ("gateway-east", "east", "j", 1)
    assert report.throughput_bytes_per_s == 10_000
    assert report.error_rate == 0.0


async def test_the_end_of_a_job_is_reported_with_its_totals(
    gateway: Gateway, smo: StandInOrchestrator, data: Data
) -> None:
    """Draft §4.4(6)."""
    east, _ = data
    ends = await Heard.on(smo.bus, subjects.TERMINATION)
    await smo.send(policy(), "gateway-east")
    await eventually(lambda: gateway._claims.followed == {("j", "j-data-r0")})
    await east.claim(0)
    await eventually(lambda: gateway._qos.total_microbatches.get("j") == 1)
    await smo.send(policy(revision=2, ended=True), "gateway-east")
    report = await ends.until()
    assert (report.sid, report.job, report.microbatches) == ("gateway-east", "j", 1)
