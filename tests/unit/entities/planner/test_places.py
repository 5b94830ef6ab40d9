"""Slots for units: within memory, spread, and where links are least busy."""

from __future__ import annotations

import random

import pytest

from entities.planner.constraints import PlaceConstraint, PlaceFacts
from entities.planner.first_placement import NeededPlace, NodeRoom, NothingFits, place_first
from entities.planner.network_topology import (
    NetworkTopology,
    dragonfly,
    fat_tree,
    measured_topology,
    topology_from,
    topology_from_graphml,
)
from entities.planner.plan_request import NoPlan
from entities.planner.search.access_routes import AccessRoutes
from entities.planner.search.link_placement import LinkProblem, link_loads, pipeline_traffic, place_on_links

GRAPHML = """<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key attr.name="label" id="d0" for="node"/><key attr.name="LinkSpeedRaw" id="d1" for="edge"/>
<graph><node id="0"><data key="d0">node-a</data></node><node id="1"><data key="d0">node-b</data></node>
<node id="2"/><edge source="0" target="1"><data key="d1">8000000</data></edge><edge source="1" target="2"/>
</graph></graphml>"""


SWITCHES = """<graphml><key attr.name="type" id="t"/><graph>
<node id="0"><data key="t">switch</data></node><node id="1"><data key="t">switch</data></node>
<edge source="0" target="1"/></graph></graphml>"""


def rooms(*memories: list[int], clusters: int = 2) -> list[NodeRoom]:
    return [
        NodeRoom(f"node-{at}", f"cluster-{at % clusters}", tuple(enumerate(slots)))
        for at, slots in enumerate(memories)
    ]


def test_replicas_go_to_different_clusters_and_those_of_a_number_to_one() -> None:
    units = [NeededPlace(stage, replica) for stage in range(2) for replica in range(2)]
    found = place_first(units, rooms([0, 0], [0, 0]), ["cluster-0", "cluster-1"])
    assert isinstance(found, list)
    assert [node for node, _ in found] == [0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_units_fit_if_there_is_a_way(seed: int) -> None:
    """Slots are drawn around the units' needs: exactly what they need, and a few too small ones."""
    draws = random.Random(seed)
    needs = [draws.randint(1, 9) for _ in range(12)]
    slots = [need + draws.randint(0, 1) for need in needs]
    draws.shuffle(slots)
    units = [NeededPlace(at % 3, at // 3, max(needs[at % 3 :: 3])) for at in range(12)]
    wanted = sorted((unit.memory_bytes for unit in units), reverse=True)
    possible = all(a >= b for a, b in zip(sorted(slots, reverse=True), wanted, strict=True))
    nodes = rooms(*(slots[at : at + 3] for at in range(0, 12, 3)))
    found = place_first(units, nodes, ["cluster-0", "cluster-1"])
    assert isinstance(found, NothingFits) is not possible, seed
    if not isinstance(found, NothingFits):
        assert len(set(found)) == 12
        assert all(
            dict(nodes[node].slots)[slot] >= unit.memory_bytes
            for unit, (node, slot) in zip(units, found, strict=True)
        )


def test_what_fits_nowhere_is_named_with_what_is_left() -> None:
    found = place_first([NeededPlace(0, 0, 5)], rooms([4], [3]), ["cluster-0", "cluster-1"])
    assert found == NothingFits(0, 4)


def test_siblings_elsewhere_count() -> None:
    found = place_first(
        [NeededPlace(0, 0)], rooms([0], [0]), ["cluster-0", "cluster-1"], {0: [("cluster-0", "node-0")]}
    )
    assert found == [(1, 0)]


def test_paths_of_a_fat_tree_are_shared_equally() -> None:
    topology = fat_tree(4)
    routes = AccessRoutes(topology, topology.hosts)
    assert len(topology.hosts) == 16
    assert routes.shares.shape[0] == 8  # edge switches
    far = routes.shares[routes.access[0], routes.access[15]]
    assert far.sum() == pytest.approx(4)  # edge, aggregate, core, aggregate, edge
    assert sorted(set(far.round(3).tolist())) == [0, 0.25, 0.5]


@pytest.mark.parametrize("seed", range(3))
def test_places_on_links_are_no_worse_and_loads_are_what_they_are_said_to_be(seed: int) -> None:
    topology = dragonfly(4, 3, 2)
    routes = AccessRoutes(topology, topology.hosts)
    count = len(topology.hosts)
    problem = LinkProblem(
        traffic=pipeline_traffic([6, 6], [0, 1e6], [1e6, 2e6], 8),
        slot_host=range(count),
        slot_class=[0] * count,
        routes=routes,
        facts=PlaceFacts(("c",) * count, (frozenset(),) * count),
    )
    draws = random.Random(seed)
    start = draws.sample(range(count), 12)
    found = place_on_links(problem, start)
    assert found.busiest_ms < found.before_ms, seed
    assert link_loads(problem, found.slots).max() == pytest.approx(found.busiest_ms)
    assert len(set(found.slots)) == 12


def test_constraints_come_before_links() -> None:
    topology = fat_tree(4)
    count = len(topology.hosts)
    apart = PlaceConstraint(kind="apart", units=(0, 1), scope="cluster", hard=True)
    problem = LinkProblem(
        traffic={(0, 1): 1e9, (1, 2): 1.0},
        slot_host=range(count),
        slot_class=[0] * count,
        routes=AccessRoutes(topology, topology.hosts),
        facts=PlaceFacts(tuple(f"c{host // 8}" for host in range(count)), (frozenset(),) * count),
        constraints=(apart,),
    )
    found = place_on_links(problem, [0, 1, 2])
    assert found.slots[0] // 8 != found.slots[1] // 8


def test_graphml_is_read() -> None:
    topology = topology_from_graphml("net.graphml", GRAPHML)
    assert topology.hosts == ("node-a", "node-b", "2")
    assert topology.links["node-a", "node-b"] == pytest.approx(1000)  # bytes a millisecond
    with pytest.raises(NoPlan, match=r"net.graphml does not have node-z of the mesh among its 3 hosts"):
        topology.check_hosts(["node-z"], "net.graphml")


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{", "not XML"),
        ("<graphml><graph/></graphml>", "has no edge"),
        (GRAPHML.replace('target="2"', 'target="9"'), "an edge ends at node '9'"),
        ("<!DOCTYPE x>" + GRAPHML, "declares entities"),
        (GRAPHML.replace("8000000", "fast"), "LinkSpeedRaw between node-a and node-b is fast: give bit/s"),
        (SWITCHES, "all its nodes are of another type than host"),
    ],
)
def test_bad_graphml_is_refused_in_one_line(text: str, refusal: str) -> None:
    with pytest.raises(NoPlan, match=refusal):
        topology_from_graphml("net.graphml", text)


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"kind": "torus"}, "kind is 'torus'; give fat_tree"),
        ({"kind": "fat_tree", "arity": 3}, "even arity"),
        ({"kind": "fat_tree", "ports": 3}, "net.yaml: ports: unknown field; fat_tree has arity, oversubs"),
        ({"kind": "dragonfly", "groups": 3}, "net.yaml: routers is missing; dragonfly has groups, routers"),
        ({"kind": "fat_tree", "arity": 1_000_000}, "arity is 1000000: give a whole number of at most 64"),
        ({"kind": "fat_tree", "arity": 2, "gbps": float("nan")}, "gbps is nan: give a number"),
        ({"kind": "fat_tree", "arity": 2, "hosts": ["a", "a"]}, "none of them twice"),
        ({"kind": "links", "hosts": "a", "links": []}, "hosts is 'a': give a list"),
        ({"kind": "links", "hosts": ["a"], "links": [{"between": ["a"]}]}, r"links\[0\] needs between"),
        ({"kind": "links", "hosts": ["z"], "links": [{"between": ["a", "b"], "gbps": 1}]}, "no link has z"),
        ({"kind": "links", "links": [{"between": ["a", "b"], "gbps": 1}]}, "hosts is empty"),
        ({"kind": "fat_tree", "arity": 2, "hosts": ["a", "b", "c"]}, "has places for 2"),
    ],
)
def test_bad_topologies_are_refused_in_one_line(body: dict[str, object], refusal: str) -> None:
    with pytest.raises(NoPlan, match=refusal):
        topology_from("net.yaml", body)


def test_topologies_of_files_and_measurements() -> None:
    links = topology_from(
        "net.yaml",
        {
            "kind": "links",
            "hosts": ["a", "b"],
            "links": [{"between": ["a", "s"], "gbps": 1}, {"between": ["s", "b"], "gbps": 2}],
        },
    )
    assert links.hosts == ("a", "b")
    assert topology_from("net.yaml", {"kind": "dragonfly", "groups": 3, "routers": 2, "hosts_per_router": 1})
    measured = measured_topology({("a", "b"): 2e9, ("a", "c"): 1e9}, ["a", "b", "c"])
    assert measured.links["a", "b"] == 2e6
    assert measured.links["b", "c"] == 1.5e6
    with pytest.raises(NoPlan, match="no way from a to c"):
        AccessRoutes(NetworkTopology(("a", "c"), {("a", "b"): 1.0, ("c", "d"): 1.0}), ("a", "c"))
