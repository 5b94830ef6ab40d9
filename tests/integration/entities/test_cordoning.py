"""Changes to one place that come at the same time: the last word of an operator stands."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest

from bus import subjects
from bus.messaging.key_value import Change
from bus.tasks import background
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import CordonService
from entities.orchestrator.nodes.draining import Draining
from schemas.cluster import Cordon, LeaveNotice, NodeStatus, Slot
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadInput, Conflict, NotFound, Refused
from schemas.fault import DeviceErrors, FaultReport
from schemas.gateway_api import CordonPlace, UncordonPlace
from schemas.registry import Endpoint
from schemas.task_graph import Placement
from tests.builders.envelopes import envelope
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial
from tests.waiting import eventually

AGENT = "a-n"
ASKED = envelope()


async def cordoning(dial: Dial) -> tuple[CordonService, MeshView]:
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    mesh = MeshView()
    await mesh.node(
        NodeStatus(sid=AGENT, cluster="a", node="n", incarnation="i", slots=(), address="", warm=True)
    )
    return CordonService(bus, mesh, FaultQueue(bus)), mesh


def drain(reason: str = "drained") -> CordonPlace:
    return CordonPlace(node=AGENT, reason=reason, user="me", drain=True)


async def test_a_drain_that_is_lifted_while_it_tells_its_progress_stays_lifted(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    (cordon,) = (await serving.cordon(drain(), ASKED)).cordons
    lifted, _ = await asyncio.gather(
        serving.uncordon(UncordonPlace(node=AGENT, user="me"), ASKED), serving.tell_progress(cordon, "empty")
    )
    assert lifted.cordons == ()
    assert mesh.cordons.active() == ()
    after, _ = await cordoning(dial)
    await after.load()
    with pytest.raises(NotFound):  # nor does the next orchestrator find it
        await after.uncordon(UncordonPlace(node=AGENT, user="me"), ASKED)


async def test_a_drain_that_is_lifted_right_after_its_progress_was_told_is_lifted(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    (cordon,) = (await serving.cordon(drain(), ASKED)).cordons
    await asyncio.gather(
        serving.tell_progress(cordon, "empty"), serving.uncordon(UncordonPlace(node=AGENT, user="me"), ASKED)
    )
    assert mesh.cordons.active() == ()


async def test_progress_of_a_drain_that_was_asked_for_anew_does_not_take_its_reason_back(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    (cordon,) = (await serving.cordon(drain("fans"), ASKED)).cordons
    await asyncio.gather(serving.cordon(drain("new fans"), ASKED), serving.tell_progress(cordon, "empty"))
    (held,) = mesh.cordons.active()
    assert (held.reason, held.progress) == ("new fans", "")
    kept = await (await dial("reader")).bucket(subjects.CORDON).entries()
    assert [one.message for one in kept] == [held]
    assert isinstance(held, Cordon)


DEVICE = DeviceErrors(device="cuda:0", ecc_errors=3)
THERE = Placement(sid="j-s0-r0", cluster="a", node="n", slot=0, device="cuda:0")


@pytest.mark.parametrize(
    ("busy_with", "placed", "drained"),
    [
        (None, None, False),
        ("j-s0-r0", None, True),
        (None, THERE, True),
        ("k-s0-r0", THERE.model_copy(update={"node": "m"}), False),
        (None, THERE.model_copy(update={"device": "cuda:1"}), False),
    ],
)
async def test_a_device_is_drained_on_the_word_of_an_instance_that_is_there(
    dial: Dial, busy_with: str | None, placed: Placement | None, drained: bool
) -> None:
    """Its own record says that it is on node n, which is the instance's word as much as the errors are."""
    serving, mesh = await cordoning(dial)
    slots = (Slot(index=0, device="cuda:0", busy_with=busy_with),)
    await mesh.node(mesh.nodes[AGENT].model_copy(update={"slots": slots}))
    said = instance("j-s0-r0", endpoint=Endpoint(cluster="a", node="n"))
    await mesh.record(Change(key=said.sid, message=said, revision=1))
    report = FaultReport(
        reporter="router-a",
        job="j",
        sid=said.sid,
        incarnation=said.incarnation,
        kind="device",
        evidence="ecc",
        device=DEVICE,
    )
    await serving.device(report, placed)
    assert [(one.agent, one.slot, one.draining) for one in mesh.cordons.active()] == (
        [(AGENT, 0, True)] if drained else []
    )


def notice(deadline_s: float, **fields: str) -> LeaveNotice:
    return LeaveNotice.model_validate({"node": AGENT, "deadline_s": deadline_s, "by": "me", **fields})


async def test_of_several_deadlines_the_soonest_counts(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    untils = []
    for deadline_s in (60.0, 30.0, 90.0):
        await serving.leave(notice(deadline_s), ASKED)
        (cordon,) = mesh.cordons.active()
        assert cordon.leaves is not None
        untils.append(cordon.leaves.until)
    assert untils[1] < untils[0]
    assert untils[2] == untils[1]


async def test_an_agent_says_of_itself_alone_that_it_leaves(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    with pytest.raises(Refused, match="a-other says that a-n leaves: agents speak of their own"):
        await serving.left(notice(30.0), envelope(EntityKind.CLUSTER, "a-other"))
    assert mesh.cordons.active() == ()
    await serving.left(notice(30.0), envelope(EntityKind.CLUSTER, AGENT))
    (cordon,) = mesh.cordons.active()
    assert cordon.draining


async def test_an_agent_that_is_not_there_says_nothing_of_a_node_that_has_its_name(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    await mesh.node(
        NodeStatus(sid="a-b-n", cluster="a", node="b-n", incarnation="i", slots=(), address="", warm=True)
    )
    with pytest.raises(NotFound, match="b-n is away"):
        await serving.left(notice(30.0, node="b-n"), envelope(EntityKind.CLUSTER, "b-n"))
    assert mesh.cordons.active() == ()


async def test_nobody_else_says_that_an_agent_got_a_signal(dial: Dial) -> None:
    """It would not be told, and its node would be closed for good."""
    serving, mesh = await cordoning(dial)
    with pytest.raises(BadInput, match="source signal: only a node's agent says so"):
        await serving.leave(notice(30.0, source="signal"), ASKED)
    assert mesh.cordons.active() == ()


async def test_an_agent_is_told_of_a_sooner_deadline_too(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    told: list[LeaveNotice] = []

    async def leave(order: LeaveNotice, envelope: Envelope) -> Ack:
        told.append(order)
        return Ack()

    await (await dial(AGENT, EntityKind.CLUSTER)).serve(subjects.LEAVE, leave, agent=AGENT)
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    draining = Draining(bus, mesh, serving, {}, AsyncMock(), look_every_s=0.01)
    async with background(draining.run()):
        await serving.leave(notice(600.0), ASKED)
        await eventually(lambda: told)
        await serving.leave(notice(30.0, source="cloud"), ASKED)
        await eventually(lambda: len(told) == 2)
        await eventually(lambda: mesh.cordons.active()[0].progress == "empty")
    assert [round(order.deadline_s, -1) for order in told] == [600.0, 30.0]


async def test_a_notice_for_a_node_that_is_unknown_or_away_or_another_incarnation_changes_nothing(
    dial: Dial,
) -> None:
    serving, mesh = await cordoning(dial)
    with pytest.raises(NotFound, match="no node m; there are a-n"):
        await serving.leave(notice(30.0, node="m"), ASKED)
    with pytest.raises(Conflict, match="a-n runs as i, not as k"):
        await serving.leave(notice(30.0, incarnation="k"), ASKED)
    assert mesh.cordons.active() == ()
    assert await (await dial("reader")).bucket(subjects.CORDON).entries() == []


async def test_a_leave_ends_with_its_incarnation_and_leaves_a_cordon_of_before(dial: Dial) -> None:
    serving, mesh = await cordoning(dial)
    await serving.cordon(CordonPlace(node=AGENT, reason="fans", user="me"), ASKED)
    await serving.leave(notice(30.0), ASKED)
    (leaving,) = mesh.cordons.active()
    with pytest.raises(Conflict, match="nobody can take that back"):
        await serving.uncordon(UncordonPlace(node=AGENT, user="me"), ASKED)
    await serving.end_leave(leaving)
    (cordon,) = mesh.cordons.active()
    assert (cordon.leaves, cordon.draining) == (None, False)
    await serving.uncordon(UncordonPlace(node=AGENT, user="me"), ASKED)
    await serving.leave(notice(30.0), ASKED)
    (leaving,) = mesh.cordons.active()
    await serving.end_leave(leaving)
    assert mesh.cordons.active() == ()
