"""Links between nodes, learnt from the transfers of all jobs."""

from __future__ import annotations

import pytest

from bus.messaging.key_value import Change
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.mesh.node_links import NodeLink, NodeLinks
from schemas.registry import Endpoint
from schemas.signals import LinkReport, QosReport
from schemas.telemetry import LinkFigures
from tests.builders.graphs import node
from tests.builders.records import instance
from tests.builders.telemetry import qos_report


def report(sender: str, receiver: str, latency_ms: float | None, bytes_per_s: float | None) -> QosReport:
    figures = LinkFigures(latency_ms=latency_ms, bandwidth_bytes_per_s=bytes_per_s)
    return qos_report(links=(LinkReport(sender=sender, receiver=receiver, figures=figures),))


HOMES = {"j-s0-r0": "a-n", "j-s0-r1": "a-n", "j-s1-r0": "b-n"}


def test_figures_of_all_instances_of_two_nodes_are_one_link() -> None:
    links = NodeLinks()
    links.take(report("j-s0-r0", "j-s1-r0", 1.0, 100.0), HOMES.get)
    assert links.of("a-n", "b-n") == NodeLink(1.0, 100.0)
    links.take(report("j-s0-r1", "j-s1-r0", 3.0, None), HOMES.get)
    assert links.of("a-n", "b-n") == NodeLink(pytest.approx(1.5), 100.0)
    links.take(report("j-s0-r1", "j-s1-r0", None, 200.0), HOMES.get)
    assert links.bytes_per_s() == {("a-n", "b-n"): pytest.approx(125.0)}
    assert links.of("b-n", "a-n") == NodeLink()


def test_what_stays_on_a_node_or_is_unknown_says_nothing() -> None:
    links = NodeLinks()
    links.take(report("j-s0-r0", "j-s0-r1", 1.0, 100.0), HOMES.get)
    links.take(report("j-s0-r0", "k-s0-r0", 1.0, 100.0), HOMES.get)
    assert links.bytes_per_s() == {}


async def test_the_orchestrator_keeps_them_beyond_a_job_and_forgets_nodes_that_left() -> None:
    mesh = MeshView()
    for cluster in "ab":
        await mesh.node(node(cluster, "n"))
    for sid, cluster in (("j-s0-r0", "a"), ("j-s1-r0", "b")):
        record = instance(sid, endpoint=Endpoint(cluster=cluster, node="n"))
        await mesh.record(Change(key=sid, message=record, revision=1))
    mesh.report(report("j-s0-r0", "j-s1-r0", 1.0, 100.0))
    mesh.forget_job("j")
    assert mesh.links.bytes_per_s() == {("a-n", "b-n"): 100.0}
    await mesh.record(Change(key="b-n", message=None, revision=2))
    assert mesh.links.bytes_per_s() == {}
