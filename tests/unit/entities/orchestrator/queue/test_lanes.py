"""Which lanes there are, and which are open while slots compute."""

from __future__ import annotations

from typing import Any

from entities.orchestrator.queue.lanes import COMPUTING, RegisteredLanes, agent_of, with_builds
from entities.orchestrator.queue.mesh_slots import RegisteredSlots, slot_facts
from entities.queue.queued_job import ActiveJob, JobRequest, WorkKind
from entities.queue.slot_pools import SlotTable
from schemas.cluster import NodeStatus
from tests.builders.graphs import node


def slots_of(*nodes: NodeStatus, **closed: Any) -> SlotTable:
    return RegisteredSlots().table(nodes, closed.get("cordoned", {}))


def lanes_of(table: SlotTable) -> list[str]:
    return [slot.slot for slot in table.slots if slot.lane]


def test_lanes_are_given_out_over_all_nodes_and_faster_ones_first() -> None:
    slow, fast = node("a", slots=2), node("b", slots=2)
    speed = {"stage": 4.0}
    fast = fast.model_copy(
        update={"slots": tuple(slot.model_copy(update={"speed": speed}) for slot in fast.slots)}
    )
    even = RegisteredLanes().table(slots_of(slow, node("b", slots=2)), [slow, node("b", slots=2)])
    assert [agent_of(lane) for lane in lanes_of(even)] == ["a-n", "b-n", "a-n", "b-n"]
    uneven = RegisteredLanes().table(slots_of(slow, fast), [slow, fast])
    assert [agent_of(lane) for lane in lanes_of(uneven)] == ["b-n", "b-n", "a-n", "a-n"]


def test_nodes_that_take_no_units_and_cordoned_slots_have_no_lanes() -> None:
    first, other = node("a", slots=2), node("b", slots=1)
    table = RegisteredLanes().table(slots_of(first, other, cordoned={"a-n": {0}}), [first])
    assert lanes_of(table) == ["a-n/1/lane"]
    assert table.computing == 3


def test_an_equal_mesh_gives_the_same_table() -> None:
    lanes, slots, first = RegisteredLanes(), slots_of(node("a", slots=2)), node("a", slots=2)
    assert lanes.table(slots, [first]) is lanes.table(slots, [node("a", slots=2)])


def test_a_lane_is_open_while_its_slot_is_free_and_one_of_each_node_always() -> None:
    nodes = [node("a", slots=3), node("b", slots=1)]
    lanes = RegisteredLanes()
    lanes.table(slots_of(*nodes), nodes)
    assert lanes.shut(()) == frozenset()
    assert lanes.shut({"a-n/1", "b-n/0"}) == {"a-n/1/lane"}
    assert lanes.shut({"a-n/0", "a-n/1", "a-n/2"}) == {"a-n/1/lane", "a-n/2/lane"}


def test_lanes_of_computing_slots_are_nobodys_but_whose_unit_has_not_ended() -> None:
    nodes = [node("a", slots=3)]
    slots, lanes = slots_of(*nodes), RegisteredLanes()
    table = lanes.table(slots, nodes)
    job = ActiveJob(
        request=JobRequest(job="j", submitted_at=0.0, replica_slots=3),
        replicas=1,
        slots=("a-n/0", "a-n/1", "a-n/2"),
        started_at=0.0,
    )
    facts = slot_facts(slots, (), (), [job])
    request = JobRequest(job="b", submitted_at=0.0, work=WorkKind.PREPARATION)
    build = ActiveJob(request=request, replicas=2, slots=("a-n/1/lane", "gone/0/lane"), started_at=0.0)
    seen = with_builds(facts, table, lanes.open(facts), [build])
    assert {each.request.job: each.slots for each in seen.running} == {
        "j": job.slots,
        "b": ("a-n/1/lane",),
        COMPUTING: ("a-n/2/lane",),
    }
    assert seen.free_and_total == (0, 3), "lanes are no slots"
