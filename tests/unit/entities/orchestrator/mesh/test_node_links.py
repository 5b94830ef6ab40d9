"""Links between nodes, as their agents registered them (draft §4.3 Type 1)."""

from __future__ import annotations

from bus.messaging.key_value import Change
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.mesh.node_links import NodeLink
from schemas.envelope import EntityKind
from schemas.registry import PeerLink, ServiceRecord
from tests.builders.graphs import node
from tests.builders.records import service


def record(sid: str, *links: PeerLink) -> ServiceRecord:
    return service(sid, kind=EntityKind.CLUSTER, links=links)


async def test_the_orchestrator_has_what_agents_registered_and_forgets_nodes_that_left() -> None:
    mesh = MeshView()
    for cluster in "ab":
        await mesh.node(node(cluster, "n"))
    link = PeerLink(peer="b-n", latency_ms=1.0, bandwidth_bytes_per_s=100.0)
    await mesh.record(Change(key="a-n", message=record("a-n", link), revision=1))
    assert mesh.links.of("a-n", "b-n") == NodeLink(1.0, 100.0)
    assert mesh.links.of("b-n", "a-n") == NodeLink()
    assert mesh.links.bytes_per_s() == {("a-n", "b-n"): 100.0}
    await mesh.record(Change(key="a-n", message=record("a-n"), revision=2))
    assert mesh.links.bytes_per_s() == {("a-n", "b-n"): 100.0}, "a restarted agent has measured nothing yet"
    await mesh.record(Change(key="b-n", message=None, revision=3))
    assert mesh.links.bytes_per_s() == {}
