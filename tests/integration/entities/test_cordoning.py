"""Changes to one place that come at the same time: the last word of an operator stands."""

from __future__ import annotations

import asyncio

import pytest

from bus import subjects
from bus.messaging.key_value import Change
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import CordonService
from schemas.cluster import Cordon, NodeStatus, Slot
from schemas.envelope import EntityKind
from schemas.errors import NotFound
from schemas.fault import DeviceErrors, FaultReport
from schemas.gateway_api import CordonPlace, UncordonPlace
from schemas.registry import Endpoint
from schemas.task_graph import Placement
from tests.builders.envelopes import envelope
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial

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
