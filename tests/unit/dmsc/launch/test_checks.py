"""What `dmsc doctor` says of clusters that have no router of their own."""

from __future__ import annotations

import pytest

from dmsc.launch.checks import Finding, cluster_servers
from schemas.cluster import NodeStatus
from schemas.envelope import EntityKind
from schemas.gateway_api import MeshStatus
from schemas.registry import Endpoint
from tests.builders.records import service


def finding(clusters: str, *routers: str) -> Finding:
    nodes = tuple(
        NodeStatus(
            sid=f"{cluster}-n", cluster=cluster, node="n", incarnation="i", slots=(), address="h", warm=True
        )
        for cluster in clusters
    )
    services = tuple(
        service(f"router-{cluster}", kind=EntityKind.ROUTER, endpoint=Endpoint(cluster=cluster, node="n"))
        for cluster in routers
    )
    return cluster_servers(MeshStatus(services=services, nodes=nodes, jobs=()), EntityKind.ROUTER)


@pytest.mark.parametrize(
    ("clusters", "routers", "ok", "text"),
    [
        ("ab", "ab", True, "of a, b"),
        ("ax", "a", True, "of a; x has none, router-a serves it"),
        ("x", "", False, "none lives; nodes are in x"),
        ("", "a", True, "of a"),
    ],
)
def test_each_cluster_with_nodes_needs_somebody_who_routes(
    clusters: str, routers: str, ok: bool, text: str
) -> None:
    found = finding(clusters, *routers)
    assert (found.ok, found.text) == (ok, text)
    assert found.remedy.startswith("start one: dmsc run router --cluster")
