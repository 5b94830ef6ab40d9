"""What the orchestrator knows of the mesh: records of the registry's bucket, nodes and cordons."""

from __future__ import annotations

from bus.messaging.key_value import Change
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Cordon
from schemas.envelope import EntityKind
from tests.builders.graphs import node
from tests.builders.records import instance, service


async def test_a_record_under_anothers_key_leaves_no_ghost() -> None:
    mesh = MeshView()
    await mesh.record(Change("j-s0-r0", 1, instance("j-s0-r0")))
    await mesh.record(Change("intruder", 2, instance("j-s1-r0")))
    await mesh.record(Change("j-s0-r1", 3, instance("j-s0-r0", incarnation="i2")))
    assert {sid: record.incarnation for sid, record in mesh.records.items()} == {"j-s0-r0": "i1"}
    await mesh.record(Change("j-s0-r0", 4))
    assert mesh.records == {}


async def test_an_agent_that_is_registered_and_has_not_said_which_slots_it_has_is_missed() -> None:
    mesh = MeshView()
    assert mesh.all_agents_heard()
    agent = service("a-n", kind=EntityKind.CLUSTER)
    await mesh.record(Change("a-n", 1, agent))
    assert not mesh.all_agents_heard()
    await mesh.node(node("a"))
    assert mesh.all_agents_heard()


async def test_what_the_mesh_would_have_if_it_were_empty_changes_with_nodes_slots_and_cordons_alone() -> None:
    mesh = MeshView()
    await mesh.node(node("a", slots=2))
    before = mesh.extent()
    assert mesh.extent() is before
    await mesh.node(node("a", slots=2, busy=1))
    await mesh.nudge()
    assert mesh.extent() == before, "whoever is in its slots"
    mesh.judged_lost("a-n")
    assert mesh.extent() != before
    await mesh.node(node("a", slots=2))
    assert mesh.extent() == before
    cordon = Cordon(agent="a-n", cluster="a", node="n", slot=1, reason="drained", by="olga", at=0.0)
    await mesh.cordon(cordon)
    assert mesh.extent() != before
    await mesh.uncordon(cordon)
    assert mesh.extent() == before
    await mesh.node(node("a", slots=3))
    assert mesh.extent() != before
    await mesh.node(node("b", slots=2))
    two = mesh.extent()
    mesh.forget_node("b-n")
    assert mesh.extent() != two
