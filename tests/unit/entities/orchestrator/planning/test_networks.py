"""What lies between nodes changes where a job runs, where that matters: topology files and measured links."""

from __future__ import annotations

import pytest

from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.plan_requests import (
    MeshNetwork,
    cluster_distances,
    on_network,
    request_for,
)
from entities.orchestrator.planning.task_graph import room_for
from entities.planner.network_topology import NetworkTopology, dragonfly, fat_tree, topology_from_graphml
from entities.planner.plan_request import PlanRequest
from entities.planner.search.plan_search import search_plan
from tests.builders import jobs
from tests.builders.graphs import layer, node, topology

NODES = [node("a", name, 1) for name in ("n1", "n2", "n3", "n4")]
MODEL = topology(*(layer(at, output_bytes=8_000_000) for at in range(4)))
JOB = jobs.spec(parallel={"stages": 2}, training={"steps": 2, "microbatches": 8})


GRAPHML = """<graphml><graph><node id="n1"/><node id="n2"/><node id="n3"/>
<edge source="n1" target="n2"/><edge source="n2" target="n3"/></graph></graphml>"""


def request() -> PlanRequest:
    room = room_for(JOB, NODES)
    assert not isinstance(room, NoRoom)
    return request_for(JOB, MODEL, room)


def used(asked: PlanRequest) -> set[str]:
    return {asked.slots[place.slot].node for place in search_plan(asked).places}


def test_a_slow_measured_link_is_not_used_and_equal_ones_decide_nothing() -> None:
    pairs = [(f"a-n{low}", f"a-n{high}") for low in range(1, 5) for high in range(1, 5) if low < high]
    slow = dict.fromkeys(pairs, 1000000000.0) | {("a-n1", "a-n2"): 1e7, ("a-n3", "a-n4"): 2e8}
    plain = request()
    chosen = used(plain)
    assert chosen == {"a-n1", "a-n2"}, "as they come"
    measured = on_network(plain, MeshNetwork(bytes_per_s=slow), 100.0)
    assert used(measured) != chosen
    assert not {"a-n1", "a-n2"} <= used(measured)
    assert on_network(plain, MeshNetwork(bytes_per_s=dict.fromkeys(pairs, 1e9)), 100.0) == plain
    assert on_network(plain, MeshNetwork(bytes_per_s=slow), 1e9) == plain, "beside such a step it is nothing"
    assert on_network(plain, MeshNetwork(), 100.0) == plain


def test_a_topology_has_neighbours_near_each_other() -> None:
    far = NetworkTopology(
        ("n1", "n2", "n3", "n4"),
        {
            ("n1", "left"): 1e6,
            ("n3", "left"): 1e6,
            ("n2", "right"): 1e6,
            ("n4", "right"): 1e6,
            ("left", "right"): 1e3,
        },
    )
    asked = on_network(request(), MeshNetwork(topology=far, name="net.yaml"), 100.0)
    assert used(asked) in ({"a-n1", "a-n3"}, {"a-n2", "a-n4"})
    assert search_plan(asked).forecast.busiest_link_ms > 0


def test_a_node_that_the_topology_lacks_is_named_and_places_are_without_it() -> None:
    network = MeshNetwork(topology=NetworkTopology(("n1", "a-n2"), {("n1", "a-n2"): 1e6}), name="net.yaml")
    assert network.missing(NODES[:2]) == ""
    assert network.missing(NODES) == (
        "net.yaml has no host a-n3, a-n4: places are without it; name its hosts as nodes or their agents "
        "are named"
    )
    assert on_network(request(), network, 100.0) == request()


def test_distances_are_links_between_clusters() -> None:
    network = dragonfly(2, 2, 1, hosts=("n1", "n2", "n3", "n4"))
    nodes = [node("a", "n1"), node("b", "n2"), node("c", "n3"), node("d", "far")]
    found = cluster_distances(network, nodes)
    assert found["a"]["b"] == 3
    assert found["a"]["c"] == found["c"]["a"] >= 3
    assert "d" not in found["a"]
    assert cluster_distances(network, [node("a", "n1"), node("b", "n1")]) == {"a": {"b": 0}, "b": {"a": 0}}


@pytest.mark.parametrize(
    ("network", "links"),
    [
        (fat_tree(4, hosts=("n1", "x", "n2", "y", "n3")), {"b": 4, "c": 6}),  # of a pod; of another one
        (dragonfly(3, 2, 1, hosts=("n1", "n2", "x", "n3")), {"b": 3, "c": 4}),
        (topology_from_graphml("net", GRAPHML), {"b": 1, "c": 2}),
    ],
)
def test_clusters_are_as_far_as_the_kind_of_network_says(
    network: NetworkTopology, links: dict[str, int]
) -> None:
    nodes = [node("a", "n1"), node("b", "n2"), node("c", "n3")]
    assert cluster_distances(network, nodes)["a"] == links


@pytest.mark.parametrize("hosts", [("n1", "n2", "n3"), ()])
def test_one_node_needs_no_network(hosts: tuple[str, ...]) -> None:
    room = room_for(JOB, [node("a", "n1", 2)])
    assert not isinstance(room, NoRoom)
    asked = request_for(JOB, MODEL, room)
    links = {(first, "switch"): 1e6 for first in hosts}
    assert on_network(asked, MeshNetwork(topology=NetworkTopology(hosts, links)), 1.0) == asked
