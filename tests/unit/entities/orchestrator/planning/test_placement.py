"""Draft §4.5(3): which unit runs in which slot."""

from __future__ import annotations

from entities.orchestrator.planning.placement import NoRoom, place
from schemas.task_graph import Placement
from tests.builders.graphs import node, placement, units


def by_sid(placed: tuple[Placement, ...] | NoRoom) -> dict[str, Placement]:
    assert not isinstance(placed, NoRoom), placed.reason
    return {one.sid: one for one in placed}


def test_replicas_are_spread_and_pipelines_stay_in_one_cluster() -> None:
    found = by_sid(place(units(2, 2, 2), [node("a", "n", 3), node("b", "n", 3)]))
    assert found["j-s0-r0"].cluster == found["j-s1-r0"].cluster
    assert found["j-s0-r1"].cluster == found["j-s1-r1"].cluster
    assert found["j-s0-r0"].cluster != found["j-s0-r1"].cluster
    assert {found["j-data-r0"].cluster, found["j-data-r1"].cluster} == {"a", "b"}


def test_no_two_units_share_a_slot_and_busy_slots_are_left_alone() -> None:
    placed = by_sid(place(units(3, 2), [node("a", "n", 4, busy=1), node("b", "n", 4, busy=1)]))
    slots = [(one.cluster, one.node, one.slot) for one in placed.values() if one.slot >= 0]
    assert len(slots) == len(set(slots)) == 6
    assert all(slot != 0 for *_, slot in slots)


def test_promised_slots_count_as_taken() -> None:
    nodes = [node("a", "n", 2)]
    promised = {"a-n": [placement("x")]}
    refused = place(units(2, 1), nodes, occupied=promised)
    assert isinstance(refused, NoRoom)
    assert "needs 2 slots, 1 of 2 free" in refused.reason


def test_too_few_slots_is_a_reason_not_an_error() -> None:
    refused = place(units(2, 2), [node("a", "n", 1)])
    assert isinstance(refused, NoRoom)
    assert refused.reason == "needs 4 slots, 1 of 1 free: waiting for a job to end or a node to join"


def test_only_the_wanted_clusters_are_used() -> None:
    placed = by_sid(place(units(1, 2), [node("a", "n", 4), node("b", "n", 4)], clusters=["b"]))
    assert {one.cluster for one in placed.values()} == {"b"}
    refused = place(units(1, 1), [node("a", "n", 4)], clusters=["z"])
    assert isinstance(refused, NoRoom)
    assert "no node of z has joined" in refused.reason


def test_placement_is_deterministic() -> None:
    nodes = [node("b", "y", 3), node("a", "x", 3)]
    assert place(units(2, 2), nodes) == place(units(2, 2), list(reversed(nodes)))
