"""What the orchestrator takes from the registry's bucket."""

from __future__ import annotations

from bus.messaging.key_value import Change
from entities.orchestrator.mesh.mesh_view import MeshView
from tests.builders.records import instance


async def test_a_record_under_anothers_key_leaves_no_ghost() -> None:
    mesh = MeshView()
    await mesh.record(Change("j-s0-r0", 1, instance("j-s0-r0")))
    await mesh.record(Change("intruder", 2, instance("j-s1-r0")))
    await mesh.record(Change("j-s0-r1", 3, instance("j-s0-r0", incarnation="i2")))
    assert {sid: record.incarnation for sid, record in mesh.records.items()} == {"j-s0-r0": "i1"}
    await mesh.record(Change("j-s0-r0", 4))
    assert mesh.records == {}
