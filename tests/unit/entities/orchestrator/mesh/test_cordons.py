"""Which places get nothing new, what a node is called, and what a device's errors close."""

from __future__ import annotations

import pytest

from entities.orchestrator.mesh.cordons import CordonBook, affected_slots, find_node
from entities.orchestrator.planning.placement import NoRoom, place
from schemas.cluster import Cordon
from schemas.errors import BadInput, NotFound
from schemas.fault import DeviceErrors
from tests.builders.graphs import node, units


def cordon(agent: str, slot: int | None = None, **changes: object) -> Cordon:
    cluster, name = agent.split("-")
    base = {
        "agent": agent,
        "cluster": cluster,
        "node": name,
        "slot": slot,
        "reason": "r",
        "by": "me",
        "at": 1.0,
    }
    return Cordon.model_validate({**base, **changes})


def test_cordoned_slots_stay_empty() -> None:
    nodes = [node("a"), node("b")]
    placed = place(units(2), nodes, cordoned={"a-n": {0}, "b-n": {1}})
    assert not isinstance(placed, NoRoom)
    assert {(one.cluster, one.slot) for one in placed if one.slot >= 0} == {("a", 1), ("b", 0)}
    refused = place(units(3), nodes, cordoned={"a-n": {0}, "b-n": {1}})
    assert isinstance(refused, NoRoom)
    assert refused.reason.startswith("needs 3 slots, 2 of 4 free (2 cordoned): waiting")


def test_a_cordoned_node_takes_no_data_unit_either() -> None:
    nodes = [node("a"), node("b")]
    placed = place(units(0), nodes, cordoned={"a-n": {None}})
    assert not isinstance(placed, NoRoom)
    assert [one.cluster for one in placed] == ["b"]
    refused = place(units(0), nodes, cordoned={"a-n": {None}, "b-n": {None}})
    assert isinstance(refused, NoRoom)
    assert refused.reason.startswith("all 2 nodes are cordoned")


def test_a_lifted_cordon_holds_nothing_back() -> None:
    book = CordonBook()
    book.put(cordon("a-n", 0))
    book.put(cordon("a-n", 1, lifted=True, ecc_errors=2))
    assert book.places() == {"a-n": {0}}
    assert not book.whole("a-n")
    book.put(cordon("a-n"))
    assert book.whole("a-n")
    assert [one.slot for one in book.active()] == [None, 0]


def test_what_a_node_is_called() -> None:
    nodes, book = [node("a"), node("b"), node("b", "m")], CordonBook()
    assert find_node("b-n", nodes, book) == ("b-n", "b", "n")
    assert find_node("m", nodes, book) == ("b-m", "b", "m")
    with pytest.raises(BadInput, match="say a-n or b-n"):
        find_node("n", nodes, book)
    with pytest.raises(NotFound, match="there are a-n, b-m, b-n"):
        find_node("x", nodes, book)
    book.put(cordon("c-gone"))
    assert find_node("gone", nodes, book) == ("c-gone", "c", "gone")


def test_a_devices_errors_close_its_own_slots_once() -> None:
    status, book = node("a", devices=("cuda:0", "cuda:1", "cuda:0")), CordonBook()
    errors = DeviceErrors(device="cuda:0", ecc_errors=2)
    assert affected_slots(status, errors, book) == (0, 2)
    book.put(cordon("a-n", 0))
    assert affected_slots(status, errors, book) == (0, 2)  # what runs there has to go, all the same
    book.put(cordon("a-n", 0, draining=True))
    assert affected_slots(status, errors, book) == (2,)
    for slot in (0, 2):
        book.put(cordon("a-n", slot, lifted=True, ecc_errors=2))
    assert affected_slots(status, errors, book) == ()
    assert affected_slots(status, DeviceErrors(device="cuda:0", ecc_errors=3), book) == (0, 2)
    assert affected_slots(status, DeviceErrors(device="cuda:0", xid_errors=(79,)), book) == (0, 2)
