"""The mesh and its jobs as the queue's core sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entities.orchestrator.queue.mesh_slots import (
    LEFT_BEHIND,
    RegisteredSlots,
    as_needed,
    busy_slots,
    emptied,
    job_request,
    queue_rules,
    reshaped,
    shaped,
    slot_facts,
    work_left_s,
)
from entities.queue.decision import QueueDecision
from entities.queue.queue_rules import QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas
from entities.queue.reservations import SlotReservation
from entities.queue.scheduling import QueueSurroundings, decide
from entities.queue.slot_pools import MeshSlot, SlotTable
from schemas.errors import BadInput
from schemas.job_file.parallel import ReplicaRange
from schemas.task_graph import PlanForecast
from tests.builders import jobs
from tests.builders.graphs import graph, node, unit
from tests.builders.jobs import job as job_record


def test_slots_are_free_once_the_exit_from_them_is_seen() -> None:
    nodes = [node("a", slots=3, busy=1), node("b")]
    registered = RegisteredSlots()
    table = registered.table(nodes, {"b-n": {None}})
    request = JobRequest(job="k", submitted_at=0.0, replica_slots=1)
    active = ActiveJob(request=request, replicas=1, slots=("a-n/1",), started_at=0.0, work_s=None)
    facts = slot_facts(table, busy_slots(nodes), [], [active])
    held = {job.request.job: job.slots for job in facts.running}
    assert held == {"k": ("a-n/1",), LEFT_BEHIND: ("a-n/0",)}
    assert [slot.slot for slot in table.slots if slot.closed] == ["b-n/0", "b-n/1"]
    assert slot_facts(table, busy_slots(emptied(nodes)), [], []).running == ()
    assert facts.as_decided(slot_facts(table, busy_slots(nodes), [], [active]))
    leaving = replace(active, leaving=frozenset(active.slots))
    assert not facts.as_decided(slot_facts(table, busy_slots(nodes), [], [leaving]))
    opened = registered.table(nodes, {})
    assert not facts.as_decided(slot_facts(opened, busy_slots(nodes), [], [active]))


def test_the_table_of_slots_is_the_same_until_a_slot_is_another() -> None:
    nodes = [node("a", slots=3, busy=1), node("b")]
    registered = RegisteredSlots()
    table = registered.table(nodes, {})
    assert registered.table(emptied(nodes), {}) is table
    assert registered.table(nodes, {"b-n": {0}}) is not table
    assert [slot.closed for slot in registered.table(nodes, {"b-n": {0}}).slots[3:]] == [True, False]


def test_a_job_asks_the_queue_for_the_memory_that_each_of_its_slots_must_have() -> None:
    def asked(*rules: dict[str, Any]) -> int:
        spec = jobs.spec(plan={"constraints": list(rules)})
        return job_request(jobs.job("j", spec=spec), spec).needs.memory_bytes

    everywhere = {"kind": "memory", "gib": 40}
    assert asked(everywhere, {"kind": "memory", "gib": 2}) == 40 << 30
    assert asked({**everywhere, "layers": ["head"]}, {**everywhere, "hard": False}) == 0
    (small, large) = RegisteredSlots().table([node("a", slots=2)], {}).slots
    assert small.memory_bytes == large.memory_bytes == 0


def test_a_job_asks_the_queue_for_slots_of_its_kind_precision_labels_and_bits() -> None:
    record = jobs.job(
        "j", spec=jobs.spec(requires={"device": "cuda", "precision": "bf16", "labels": {"region": "eu"}})
    )
    record = record.model_copy(update={"bits_class": "cuda-1"})
    able = {"kind": "cuda", "precisions": ("bf16",), "labels": {"region": "eu"}, "bits_class": "cuda-1"}
    less: list[dict[str, Any]] = [
        {},
        {"kind": "cpu"},
        {"precisions": ()},
        {"labels": {}},
        {"bits_class": "cuda-2"},
    ]
    bare = node("a", "n", len(less))
    slots = tuple(slot.model_copy(update=able | lack) for slot, lack in zip(bare.slots, less, strict=True))
    table = RegisteredSlots().table([bare.model_copy(update={"slots": slots})], {})
    needs = job_request(record, record.spec, "").needs
    assert [needs.admit(slot) for slot in table.slots] == [True, False, False, False, False]


def test_what_a_job_file_says_of_waiting_is_what_the_queue_hears() -> None:
    spec = jobs.spec(
        queue={
            "priority": 3,
            "deadline_s": 60.0,
            "wall_time_s": 9.0,
            "notice_s": 2.0,
            "after": ["jfirst"],
            "apart": ["jother"],
        }
    )
    record = jobs.job("j", spec=spec, submitted_at=100.0)
    request = job_request(record, spec, "held by ann: queue.hold")
    assert (request.priority, request.deadline, request.wall_time_s, request.notice_s) == (3, 160.0, 9.0, 2.0)
    assert (request.after, request.apart, request.beside) == (("jfirst",), ("jother",), ())
    assert request.held == "held by ann: queue.hold"


def test_a_job_with_a_range_asks_for_a_number_of_replicas_and_says_how_fast_each_is() -> None:
    spec = jobs.spec(
        parallel={"stages": 2, "replicas": {"min": 1, "want": 2, "max": 4}, "standbys": 1},
        training={"steps": 2, "microbatches": 4},
    )
    request = job_request(jobs.job("j", spec=spec), spec)
    assert (request.replicas.least, request.replicas.want, request.replicas.most) == (1, 2, 4)
    assert (request.replica_slots, request.other_slots) == (2, 2)
    assert request.speeds == (
        0.5,
        1.0,
        1.0,
        1.8,
    )  # four microbatches take three as long as two
    steps = forecast(by_replicas=(20.0, 10.0, 9.0, 5.0))
    planned = graph(unit("j-s0-r0")).model_copy(update={"forecast": steps})
    request = job_request(jobs.job("j", spec=spec, graph=planned), spec)
    assert request.speeds == (0.5, 1.0, 10 / 9, 2.0)
    rigid = jobs.spec(parallel={"stages": 2, "replicas": [1, 2]})
    assert job_request(jobs.job("j", spec=rigid), rigid).slots(1) == 3


def test_a_shape_that_does_not_fit_to_the_rest_is_refused_in_one_line() -> None:
    spec = jobs.spec(parallel={"stages": 2, "replicas": {"min": 1, "want": 2, "max": 3}, "standbys": [0, 1]})
    assert reshaped(spec, None, 4).parallel.replicas == ReplicaRange(min=1, want=4, max=4)
    with pytest.raises(BadInput) as refused:
        reshaped(spec, 3, None)
    assert "standbys names 2 stages, but stages is 3: give --replicas" in refused.value.text
    listed = jobs.spec(parallel={"stages": 2, "replicas": [1, 2]})
    assert reshaped(listed, 1, 3).parallel.replicas_per_stage() == (3,)
    with pytest.raises(BadInput):
        reshaped(listed, 1, None)


def forecast(**more: Any) -> PlanForecast:
    times = {"step_ms": 1.0, "bottleneck_ms": 1.0, "fill_ms": 0.0, "reduction_ms": 0.0, "constant_ms": 0.0}
    return PlanForecast.model_validate(times | more)


def test_an_order_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        queue_rules("lifo")
    assert refused.value.text == "--queue-order lifo: give one of fcfs, priority, fair, las"


def test_until_a_step_is_measured_a_jobs_end_is_predicted_by_its_forecast() -> None:
    record = job_record()
    steps, request = record.last_step, job_request(record, record.spec)
    assert work_left_s(record, record.spec, 0, request) is None, "it has no plan yet"
    planned_as = graph()
    forecast = PlanForecast(step_ms=500.0, bottleneck_ms=400.0, fill_ms=50.0, reduction_ms=0, constant_ms=50)
    planned = record.model_copy(update={"graph": planned_as.model_copy(update={"forecast": forecast})})
    assert work_left_s(planned, record.spec, 1, request) == pytest.approx((steps - 1) * 0.5)
    measured = planned.model_copy(update={"tokens_per_s": 1e3})
    assert work_left_s(measured, record.spec, 1, request) != pytest.approx((steps - 1) * 0.5)


def test_a_range_is_not_widened_without_bound() -> None:
    spec = jobs.spec(parallel={"replicas": {"min": 1, "want": 2, "max": 256}})
    for ask in (lambda: shaped(spec, 300), lambda: reshaped(spec, None, 300)):
        with pytest.raises(BadInput) as refused:
            ask()
        assert refused.value.text == (
            "300 replicas: parallel.replicas would be too wide: min 1 to max 300 are 300 numbers of "
            "replicas: give at most 256"
        )
    assert shaped(spec, 256).parallel.replicas == ReplicaRange(min=1, want=256, max=256)


def test_a_version_of_a_service_wants_what_its_load_needs_and_grows_into_no_idle_slots() -> None:
    spec = jobs.spec(
        parallel={"stages": 2, "replicas": {"min": 0, "want": 2, "max": 4}}, serve={"service": "chat"}
    )
    request = job_request(jobs.job("j", spec=spec), spec)
    within = spec.parallel.replica_range
    assert within is not None
    assert (request.replicas, request.speeds) == (Replicas(least=1, want=2, most=2), ())
    assert as_needed(request, within, 4).replicas == Replicas(least=1, want=4, most=4)
    assert as_needed(request, within, 9).replicas.want == 4
    assert as_needed(request, within, 1).replicas == Replicas(least=1, want=1, most=1)


def served_request(priority: int = 0, **record: Any) -> JobRequest:
    spec = jobs.spec(
        parallel={"stages": 2, "replicas": {"min": 0, "want": 1, "max": 2}},
        serve={"service": "chat"},
        queue={"priority": priority},
    )
    return job_request(jobs.job("chat", spec=spec, **record), spec)


def test_services_and_training_share_slots_by_priority() -> None:
    table = SlotTable([MeshSlot(slot=f"s{number}", node="n") for number in range(4)])
    around = QueueSurroundings(table=table, rules=QueueRules(order=QueueOrder.PRIORITY))
    trains = jobs.spec(parallel={"stages": 1, "replicas": 3}, queue={"priority": 1})
    asks = job_request(jobs.job("trains", spec=trains), trains)
    training = ActiveJob(request=asks, replicas=1, slots=("s0", "s1", "s2"), started_at=0.0)

    def woken(priority: int) -> QueueDecision:
        waiting = QueuedJob(request=served_request(priority), since=10.0)
        return decide([waiting], [training], around, 10_000.0)

    assert [park.job for park in woken(2).parks] == ["trains"]
    assert woken(1).parks == []
    assert "needs 2 slots, 1 of 4 free" in woken(1).holds["chat"].reason
    # By its load it has a second replica, which a job of higher priority takes; not its minimum of one.
    within = ReplicaRange(min=0, want=1, max=2)
    busy = ActiveJob(
        request=as_needed(served_request(), within, 2),
        replicas=2,
        slots=("s0", "s1", "s2", "s3"),
        started_at=0.0,
    )
    pair = jobs.spec(parallel={"stages": 1, "replicas": 2}, queue={"priority": 1})
    urgent = QueuedJob(request=job_request(jobs.job("urgent", spec=pair), pair), since=10.0)
    (resize,) = decide([urgent], [busy], around, 10_000.0).resizes
    assert (resize.job, resize.replicas) == ("chat", 1)


def test_slots_that_are_reserved_for_a_services_user_are_kept_for_it() -> None:
    table = SlotTable([MeshSlot(slot=f"s{number}", node="n") for number in range(4)])
    kept = SlotReservation(name="chats", start_at=0.0, end_at=90_000.0, count=2, tenant="ruth")
    around = QueueSurroundings(table=table, reservations=(kept,))
    trains = jobs.spec(parallel={"stages": 1, "replicas": 3})
    training = QueuedJob(request=job_request(jobs.job("trains", spec=trains, user="rob"), trains), since=1.0)
    woken = QueuedJob(request=served_request(user="ruth"), since=10.0)
    decision = decide([training, woken], [], around, 10_000.0)
    assert [admission.job for admission in decision.admissions] == ["chat"]
    alone = decide([training], [], around, 10_000.0)
    assert alone.admissions == []
    assert alone.holds["trains"].reason == "needs 3 slots, 2 of 4 free, 2 kept by reservation chats"
