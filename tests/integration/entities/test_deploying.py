"""Starting instances on nodes of which some have just died, against a stand-in for their agents."""

from __future__ import annotations

import asyncio

import pytest

from bus import subjects
from bus.messaging.key_value import Change
from entities.orchestrator.job_state.instances import (
    InstanceTimes,
    JobInstances,
    MemberLost,
    NodeLost,
    NotReady,
    StartFailed,
)
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import InstanceStart, InstanceStarted, NodeStatus, Slot
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BusUnreachable, DeadlineExceeded, DmscError, NoResponders, Unavailable
from schemas.registry import PASSING, READY, SILENT, InstanceState
from schemas.step import Exported, ExportOrder, Member
from schemas.task_graph import Placement, TaskGraph, TaskUnit, UnitKind
from tests.builders.jobs import job
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial
from tests.patience import PATIENCE_S

UNITS = tuple(
    TaskUnit(
        sid=f"j-s0-r{replica}", kind=UnitKind.STAGE, stage=0, replica=replica, first_layer=0, last_layer=1
    )
    for replica in range(2)
)
PLACES = tuple(
    Placement(sid=unit.sid, cluster=cluster, node="n", slot=0, device="cpu")
    for unit, cluster in zip(UNITS, "ab", strict=True)
)
GRAPH = TaskGraph(
    units=UNITS, edges=(), constraints=(), placements=PLACES, reason="", code_digest="", layer_count=1
)


async def two_nodes() -> MeshView:
    mesh = MeshView()
    for cluster in "ab":
        slots = (Slot(index=0, device="cpu"),)
        node = {"sid": f"agent-{cluster}", "cluster": cluster, "node": "n", "incarnation": "i"}
        await mesh.node(NodeStatus(**node, slots=slots, address="127.0.0.1", warm=True))
    return mesh


async def deploy(
    dial: Dial, mesh: MeshView, times: InstanceTimes = InstanceTimes()
) -> tuple[JobInstances, asyncio.Queue[InstanceStart]]:
    """Instances of a job, and what the agent of node a is ordered; nobody answers at node b."""
    bus, agent = await dial("orchestrator", EntityKind.ORCHESTRATOR), await dial("agent-a")
    ordered: asyncio.Queue[InstanceStart] = asyncio.Queue()

    async def start(message: InstanceStart, envelope: Envelope) -> InstanceStarted:
        ordered.put_nowait(message)
        return InstanceStarted(sid=message.unit.sid, incarnation=message.incarnation, pid=1)

    await agent.serve(subjects.START_INSTANCE, start, agent="agent-a")
    instances = JobInstances(bus, mesh, job("j"), times)
    instances.graph = GRAPH
    return instances, ordered


async def gone(mesh: MeshView, sid: str) -> None:
    await mesh.record(Change(key=sid, message=None, revision=0))


async def say(mesh: MeshView, order: InstanceStart, state: InstanceState, reason: str) -> None:
    record = instance(order.unit.sid, incarnation=order.incarnation, state=state, reason=reason)
    await mesh.record(Change(key=record.sid, message=record, revision=0))


async def test_a_node_that_dies_while_it_is_ordered_to_start_is_named(dial: Dial) -> None:
    mesh = await two_nodes()
    instances, ordered = await deploy(dial, mesh)
    starting = asyncio.create_task(instances.start(UNITS))
    await ordered.get()
    await gone(mesh, "agent-b")
    with pytest.raises(NodeLost, match="node n of cluster b: node agent agent-b has left") as lost:
        await starting
    assert lost.value.agent == "agent-b"
    assert set(instances.members) == {"j-s0-r0"}  # known, so that it can be ended


async def test_a_node_that_is_not_there_any_more_is_named(dial: Dial) -> None:
    mesh = await two_nodes()
    await gone(mesh, "agent-b")
    instances, _ = await deploy(dial, mesh)
    with pytest.raises(NodeLost, match="node n of cluster b is not there"):
        await instances.start(UNITS)


async def test_a_node_that_dies_before_its_instance_is_ready_is_named(dial: Dial) -> None:
    mesh = await two_nodes()
    instances, ordered = await deploy(dial, mesh)
    starting = asyncio.create_task(instances.start(UNITS[:1]))
    await ordered.get()
    while "j-s0-r0" not in instances.members:  # noqa: ASYNC110  # it has no event for it
        await asyncio.sleep(0.01)
    await gone(mesh, "agent-a")  # the instance never said a word
    with pytest.raises(NodeLost, match="j-s0-r0: its node has left the mesh"):
        await starting


async def test_an_instance_that_falls_silent_is_its_nodes_fault_and_a_refusal_its_own(dial: Dial) -> None:
    mesh = await two_nodes()
    instances, ordered = await deploy(dial, mesh)
    starting = asyncio.create_task(instances.start(UNITS[:1]))
    await say(mesh, await ordered.get(), InstanceState.FAULTED, f"{SILENT} for 6.1 s")
    with pytest.raises(NodeLost) as lost:
        await starting
    assert lost.value.agent == "agent-a"
    starting = asyncio.create_task(instances.start(UNITS[:1]))
    await say(mesh, await ordered.get(), InstanceState.FAULTED, "bad model")
    with pytest.raises(StartFailed, match="j-s0-r0: bad model"):
        await starting
    starting = asyncio.create_task(instances.start(UNITS[:1]))
    await say(mesh, await ordered.get(), InstanceState.ACTIVE, READY)
    assert [member.sid for member in await starting] == ["j-s0-r0"]


async def test_one_that_ends_for_want_of_others_or_is_late_may_be_started_again(dial: Dial) -> None:
    """Neither is the job's fault, and neither says that the bus is away."""
    mesh = await two_nodes()
    instances, ordered = await deploy(dial, mesh, InstanceTimes(no_progress_s=0.5))
    starting = asyncio.create_task(instances.start(UNITS[:1]))
    first = await ordered.get()
    await say(mesh, first, InstanceState.FAULTED, f"{PASSING}: no bus at nats://x")
    with pytest.raises(NotReady, match="no bus at nats://x") as failed:
        await starting
    assert [one.incarnation for one in failed.value.members] == [first.incarnation]
    starting = asyncio.create_task(instances.start(UNITS[:1]))
    slow = await ordered.get()
    for second in range(4):  # it gets on, for longer than it may rest
        await say(mesh, slow, InstanceState.PENDING, f"getting ready: {second} s computed")
        await asyncio.sleep(0.25)
        assert not starting.done()
    with pytest.raises(NotReady, match="j-s0-r0 not ready, and no progress for 0 s") as late:
        await starting
    assert not isinstance(late.value, Unavailable)


@pytest.mark.parametrize("error", [DeadlineExceeded, NoResponders, BusUnreachable, Unavailable])
async def test_what_an_instance_itself_could_not_reach_is_no_sign_of_its_death(
    dial: Dial, error: type[DmscError]
) -> None:
    instances, _ = await deploy(dial, await two_nodes())
    member = Member(sid="j-s0-r0", incarnation="i")

    async def export(message: ExportOrder, envelope: Envelope) -> Exported:
        raise error("the store does not answer")

    await (await dial("j-s0-r0")).serve(subjects.EXPORT, export, job="j", sid="j-s0-r0")
    order = ExportOrder(job="j", epoch=1, version=1, url="bus://artifacts/j/weights", shard="x")
    with pytest.raises(error, match="the store does not answer") as answered:
        await instances.order(subjects.EXPORT, order, [member], deadline_s=PATIENCE_S)
    assert answered.value.answered
    silent = Member(sid="j-s0-r1", incarnation="i")
    with pytest.raises(MemberLost) as lost:
        await instances.order(subjects.EXPORT, order, [silent], deadline_s=0.5)
    assert lost.value.members == {silent}
