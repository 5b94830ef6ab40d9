"""Draft §1 and §4.3 Type 1: slots are chosen by what their nodes registered.

Taking a tag, a capability or the MIC's verdict away changes the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from entities.orchestrator.planning.eligible_slots import (
    class_of,
    eligible,
    plan_in_one_class,
    query_of,
    refusal,
)
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.plan_requests import request_for
from entities.orchestrator.planning.task_graph import plan, room_for
from entities.planner.search.plan_search import search_plan
from schemas.cluster import NodeStatus
from schemas.envelope import EntityKind
from schemas.job import JobSpec
from schemas.registry import InstanceState, ServiceRecord, TensorSchema, label_tag
from schemas.task_graph import TaskGraph
from tests.builders import jobs
from tests.builders.graphs import node, topology
from tests.builders.records import service


def place(cluster: str, count: int, **slot: Any) -> NodeStatus:
    """A node whose slots all have these fields."""
    bare = node(cluster, "n", count)
    fields = {"bits_class": "cpu-1", "precisions": ("fp32",), **slot}
    return bare.model_copy(update={"slots": tuple(each.model_copy(update=fields) for each in bare.slots)})


def record(status: NodeStatus, **more: Any) -> ServiceRecord:
    labels = status.slots[0].labels.items()
    return service(
        status.sid,
        kind=EntityKind.CLUSTER,
        prefix=f"entity/cluster/{status.cluster}",
        **{"tags": tuple(label_tag(key, value) for key, value in labels), **more},
    )


def spec(stages: int = 1, replicas: int = 1, **requires: Any) -> JobSpec:
    return jobs.spec(parallel={"stages": stages, "replicas": replicas}, requires=requires)


def planned(
    nodes: Sequence[NodeStatus], job: JobSpec, bits_class: str = "", **records: ServiceRecord
) -> TaskGraph | NoRoom:
    return plan_in_one_class(
        nodes, job, bits_class, records, lambda these: plan("j", job, topology(), these, {}, {})
    )


def clusters(graph: TaskGraph | NoRoom) -> set[str]:
    assert isinstance(graph, TaskGraph), graph
    return {each.cluster for each in graph.placements if each.slot >= 0}


def searched(nodes: Sequence[NodeStatus]) -> set[str]:
    """The clusters of the plan that is searched for a job of one instance."""
    room = room_for(spec(), nodes)
    assert not isinstance(room, NoRoom)
    request = request_for(spec(), topology(), room)
    return {request.slots[place.slot].cluster for place in search_plan(request).places}


EU = place("a", 2, labels={"region": "eu"})
US = place("b", 2, labels={"region": "us"})
GPU = place("c", 2, device="cuda:0", kind="cuda", bits_class="cuda-1", precisions=("fp32", "bf16"))


class TestTheChoice:
    def test_a_tag_that_is_taken_away_changes_it(self) -> None:
        job, records = spec(labels={"region": "eu"}), {"a-n": record(EU), "b-n": record(US)}
        assert clusters(plan_in_one_class([EU, US], job, "", records, _on(job))) == {"a"}
        other = place("b", 2, labels={"region": "eu"})
        records = {"a-n": record(EU, tags=()), "b-n": record(other)}
        assert clusters(plan_in_one_class([EU, other], job, "", records, _on(job))) == {"b"}

    def test_units_that_make_data_are_found_in_the_same_way(self) -> None:
        """Readers and functions of preprocessing take no slot, and go where the job's query leads."""
        chain = [{"name": "noise", "function": "users:noise", "replicas": 2}]
        job = spec(labels={"region": "eu"}).model_copy(
            update={"data": jobs.spec(data={"preprocess": chain}).data}
        )
        row = (TensorSchema(name="inputs", shape=(), dtype="float32"),)
        found = topology(records=((),), batch=row)

        def making(records: dict[str, ServiceRecord]) -> set[str]:
            there = [EU, place("b", 2, labels={"region": "eu"})]
            graph = plan_in_one_class(
                there, job, "", records, lambda these: plan("j", job, found, these, {}, {})
            )
            assert isinstance(graph, TaskGraph), graph
            return {each.cluster for each in graph.placements if each.slot < 0}

        both = {"a-n": record(EU), "b-n": record(EU, tags=record(EU).tags)}
        assert making(both) == {"a", "b"}
        assert making(both | {"a-n": record(EU, tags=())}) == {"b"}
        assert making(both | {"b-n": record(EU, tags=())}) == {"a"}

    def test_a_capability_that_is_taken_away_changes_it(self) -> None:
        job = spec(precision="bf16")
        able = place("a", 2, precisions=("fp32", "bf16"))
        assert clusters(planned([able, US], job)) == {"a"}
        assert clusters(planned([place("a", 2), place("b", 2, precisions=("bf16",))], job)) == {"b"}

    @pytest.mark.parametrize("state", [InstanceState.FAULTED, InstanceState.DRAINING])
    def test_the_registrys_verdict_on_a_node_changes_it(self, state: InstanceState) -> None:
        job = spec()
        assert clusters(plan_in_one_class([EU, US], job, "", {"a-n": record(EU)}, _on(job))) == {"a"}
        records = {"a-n": record(EU, state=state)}
        assert clusters(plan_in_one_class([EU, US], job, "", records, _on(job))) == {"b"}

    def test_the_clusters_judgement_of_a_slot_changes_it(self) -> None:
        """§5.5: a slot whose instance underperforms counts with what it gives (ADR-0082)."""
        fast, other = place("a", 1, speed={"stage": 2.0}), place("b", 1, speed={"stage": 1.5})
        assert searched([fast, other]) == {"a"}
        judged = place("a", 1, speed={"stage": 2.0}, condition="underperforming", performance=0.3)
        assert searched([judged, other]) == {"b"}

    def test_only_slots_of_the_kind_are_used(self) -> None:
        mixed = place("a", 2)
        slots = (mixed.slots[0], GPU.slots[1])
        mixed = mixed.model_copy(update={"slots": slots})
        (found,) = eligible([mixed], query_of(spec(device="cuda")), {})
        assert [slot.index for slot in found.slots] == [1]
        assert clusters(planned([EU, GPU], spec(device="cuda"))) == {"c"}


class TestRefusal:
    def test_it_names_what_is_asked_for_and_what_is_there(self) -> None:
        text = refusal([EU, US], spec(device="cuda", labels={"region": "eu"}), {})
        assert text == (
            "requires asks for device cuda and region=eu, no slot has it: "
            "a-n has 2 cpu, fp32, region=eu; b-n has 2 cpu, fp32, region=us"
        )

    def test_a_count_that_is_not_there_is_refused(self) -> None:
        text = refusal([EU, GPU], spec(device="cuda", count=3), {})
        assert text.startswith("requires asks for 3 slots with device cuda, there are 2: ")
        assert refusal([EU, GPU], spec(device="cuda", count=2), {}) == ""

    def test_nothing_is_refused_before_all_nodes_have_said_what_they_can_do(self) -> None:
        waking = GPU.model_copy(update={"warm": False, "slots": ()})
        assert refusal([], spec(device="cuda"), {}) == ""
        assert refusal([EU, waking], spec(device="cuda"), {}) == ""
        refused = planned([EU], spec(device="cuda"))
        assert isinstance(refused, NoRoom)
        assert refused.never


class TestBits:
    """ADR-0075: one class of bits for a job, as long as it lives."""

    def test_a_job_is_not_spread_over_classes(self) -> None:
        other = place("b", 2, bits_class="cpu-2")
        graph = planned([EU, other], spec(replicas=2))
        assert len(clusters(graph)) == 1
        assert isinstance(graph, TaskGraph)
        assert class_of([EU, other], graph, spec(replicas=2)) in ("cpu-1", "cpu-2")

    def test_the_class_of_most_speed_comes_first_and_another_if_it_has_no_room(self) -> None:
        slow = place("a", 2, speed={"stage": 1.0})
        fast = place("b", 2, bits_class="cpu-2", speed={"stage": 3.0})
        assert clusters(planned([slow, fast], spec(replicas=2))) == {"b"}
        full = fast.model_copy(
            update={"slots": tuple(slot.model_copy(update={"busy_with": "x"}) for slot in fast.slots)}
        )
        assert clusters(planned([slow, full], spec(replicas=2))) == {"a"}

    def test_a_job_that_has_a_class_stays_in_it(self) -> None:
        fast = place("b", 2, bits_class="cpu-2", speed={"stage": 9.0})
        assert clusters(planned([EU, fast], spec(), "cpu-1")) == {"a"}

    def test_growth_beyond_the_class_is_refused_with_the_way_out(self) -> None:
        other = place("b", 2, bits_class="cpu-2")
        refused = planned([EU, other], spec(replicas=3), "cpu-1")
        assert isinstance(refused, NoRoom)
        assert refused.reason.endswith("with other bits (cpu-2): a job with requires.bits: any uses both")
        assert "\n" not in refused.reason

    def test_a_job_whose_class_has_left_waits_and_says_how_to_go_on(self) -> None:
        refused = planned([EU], spec(), "cpu-9")
        assert isinstance(refused, NoRoom)
        assert not refused.never
        assert "no slot has the bits of cpu-9" in refused.reason
        assert "resume_from" in refused.reason

    def test_what_resumes_from_bits_that_nothing_has_is_refused(self) -> None:
        job = spec().model_copy(update={"resume_from": "bus://artifacts/j/checkpoints"})
        assert clusters(planned([EU, place("b", 2, bits_class="cpu-9")], job, "cpu-9")) == {"b"}
        refused = planned([EU], job, "cpu-9")
        assert isinstance(refused, NoRoom)
        assert refused.never
        assert refused.reason == (
            "no slot has the bits of cpu-9, in which the checkpoint of resume_from was computed (there are "
            "cpu-1): join such a node, or set requires.bits: any, to go on with other bits"
        )
        waking = GPU.model_copy(update={"warm": False, "slots": ()})
        refused = planned([EU, waking], job, "cpu-9")
        assert isinstance(refused, NoRoom)
        assert not refused.never, "the node that wakes up may have them"

    def test_any_bits_uses_all(self) -> None:
        other = place("b", 2, bits_class="cpu-2")
        job = spec(replicas=3, bits="any")
        graph = planned([EU, other], job)
        assert clusters(graph) == {"a", "b"}
        assert isinstance(graph, TaskGraph)
        assert class_of([EU, other], graph, job) == ""

    def test_slots_of_older_agents_are_of_any_class(self) -> None:
        old = node("b", "n", 2)
        assert clusters(planned([EU, old], spec(replicas=3), "cpu-1")) == {"a", "b"}


def _on(job: JobSpec) -> Any:
    return lambda nodes: plan("j", job, topology(), nodes, {}, {})
