"""The capacity that the queue wants: what is counted, and when it is published."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from entities.orchestrator.queue.capacity_signal import capacity_of, demand_of
from entities.orchestrator.queue.mesh_slots import BITS, PRECISION, SlotFacts
from entities.queue.decision import Cause, Hold
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas
from entities.queue.reservations import SlotReservation
from entities.queue.slot_pools import ANY_SLOT, MeshSlot, SlotNeeds, SlotTable
from schemas.machines.demand import MachineDemand
from schemas.queue import MOST_DEMANDS, QueueCapacity

NOW = 1000.0
GPU = SlotNeeds(kind="cuda")


def slots(count: int, kind: str = "cpu", **more: Any) -> list[MeshSlot]:
    return [MeshSlot(slot=f"{kind}{more}/{n}", node=kind, kind=kind, **more) for n in range(count)]


def waits(job: str, count: int, needs: SlotNeeds = ANY_SLOT, since: float = 0.0, **more: Any) -> QueuedJob:
    request = JobRequest(job=job, submitted_at=since, replica_slots=count, needs=needs, **more)
    return QueuedJob(request=request, since=since)


def runs(job: str, taken: Iterable[str], **more: Any) -> ActiveJob:
    request = JobRequest(job=job, submitted_at=0.0)
    return ActiveJob(request=request, replicas=1, slots=tuple(taken), started_at=0.0, **more)


def capacity(
    there: list[MeshSlot],
    queue: Iterable[QueuedJob],
    running: Iterable[ActiveJob] = (),
    holds: dict[str, Hold] | None = None,
    kept: tuple[SlotReservation, ...] = (),
) -> QueueCapacity:
    facts = SlotFacts(table=SlotTable(there), queue=tuple(queue), running=tuple(running))
    return capacity_of(facts, holds or {}, kept, NOW)


def lacking(found: QueueCapacity) -> dict[str, int]:
    return {demand.device or "any": demand.lacking for demand in found.demands}


def test_a_free_slot_of_another_kind_is_none() -> None:
    found = capacity([*slots(4), *slots(1, "cuda")], [waits("a", 3, GPU, 5.0), waits("b", 1, GPU, 3.0)])
    assert (found.slots, found.free, found.waiting, found.lacking, found.since) == (5, 5, 2, 3, 3.0)
    (demand,) = found.demands
    assert (demand.device, demand.jobs, demand.slots, demand.lacking) == ("cuda", 2, 4, 3)


def test_a_free_slot_of_less_memory_is_none() -> None:
    large = SlotNeeds(memory_bytes=40 << 30)
    found = capacity(
        [*slots(4, memory_bytes=8 << 30), *slots(1, memory_bytes=80 << 30)], [waits("a", 3, large)]
    )
    (demand,) = found.demands
    assert (demand.memory_bytes, demand.slots, demand.lacking) == (40 << 30, 3, 2)
    assert capacity(slots(3), [waits("a", 3, large)]).lacking == 0, "what nobody knows counts as enough"


def test_free_slots_are_shared_out_so_that_few_are_missing() -> None:
    """The first may use any slot, the second only the one that the first would take."""
    there = [*slots(1, "cuda"), *slots(1)]
    found = capacity(there, [waits("a", 1), waits("b", 1, GPU)])
    assert (found.lacking, found.since) == (0, None)
    assert capacity(there, [waits("a", 2), waits("b", 1, GPU)]).lacking == 1


def test_what_is_missing_is_the_least_possible() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    names = ("x", "y", "z")
    for _ in range(40):
        there = [
            MeshSlot(slot=str(n), node="n", labels=tuple((k, "1") for k in names if draw.random() < 0.6))
            for n in range(draw.randint(0, 5))
        ]
        queue = [
            waits(
                str(n),
                draw.randint(1, 2),
                SlotNeeds(labels=tuple((k, "1") for k in names if draw.random() < 0.5)),
            )
            for n in range(4)
        ]
        wanted = [job.request.needs for job in queue for _ in range(job.request.least_slots)]
        most = 0
        for choice in product([None, *range(len(wanted))], repeat=len(there)):
            chosen = [each for each in choice if each is not None]
            fits = all(w is None or wanted[w].admit(slot) for w, slot in zip(choice, there, strict=True))
            if fits and len(set(chosen)) == len(chosen):
                most = max(most, len(chosen))
        assert capacity(there, queue).lacking == len(wanted) - most


def test_jobs_that_no_slot_would_help_want_none() -> None:
    queue = [
        waits("held", 1, held="by olga"),
        waits("after", 1, after=("held",)),
        waits("quota", 1),
        waits("failed", 1),
        waits("large", 9),
        waits("unfit", 5, held="needs 5 slots, the mesh has 0", unfit=True),
        waits("new", 1),
    ]
    holds = {
        "held": Hold(cause=Cause.HELD, reason=""),
        "after": Hold(cause=Cause.AFTER, reason="", blocker="held"),
        "quota": Hold(cause=Cause.QUOTA, reason=""),
        "failed": Hold(cause=Cause.NEVER, reason="", blocker="gone"),
        "large": Hold(cause=Cause.NEVER, reason=""),
        "unfit": Hold(cause=Cause.HELD, reason=""),
    }
    found = capacity([], queue, holds=holds)
    assert (found.waiting, found.lacking) == (7, 15)


def test_slots_that_jobs_are_leaving_count_as_free_but_closed_ones_do_not() -> None:
    there = slots(4)
    names = [slot.slot for slot in there]
    running = [runs("a", names[:2], leaving=frozenset(names[:1])), runs("b", names[2:3], parks_at=NOW)]
    assert capacity(there, [waits("c", 4)], running).lacking == 1
    closed = slots(2, closed=True)
    assert capacity([*there[:1], *closed], [waits("c", 2)]).lacking == 1


def test_kept_slots_are_there_only_for_those_for_whom_they_are_kept() -> None:
    night = SlotReservation(name="night", start_at=NOW - 1, end_at=NOW + 60, count=2, tenant="rita")
    queue = [waits("mine", 1, tenant="rita"), waits("other", 3, tenant="olga")]
    assert capacity(slots(3), queue, kept=(night,)).lacking == 2
    assert capacity(slots(4), queue, kept=(night,)).lacking == 1


def test_a_demand_says_what_a_slot_has_to_have() -> None:
    labels = ((f"{BITS}abc", "yes"), (f"{PRECISION}bf16", "yes"), ("region", "eu"))
    (demand,) = capacity([], [waits("a", 2, SlotNeeds(kind="cuda", clusters=("c",), labels=labels))]).demands
    assert (demand.device, demand.precision, demand.bits_class, demand.clusters, demand.labels) == (
        *("cuda", "bf16", "abc", ("c",)),
        {"region": "eu"},
    )


def test_kinds_beyond_those_that_are_listed_are_counted() -> None:
    queue = [waits(str(n), 1, SlotNeeds(labels=(("rack", str(n)),))) for n in range(MOST_DEMANDS + 5)]
    found = capacity([], queue)
    assert (len(found.demands), found.lacking) == (MOST_DEMANDS, MOST_DEMANDS + 5)


@pytest.mark.parametrize("jobs", [[], [waits("a", 1)]])
def test_where_nothing_is_missing_nothing_is_since(jobs: list[QueuedJob]) -> None:
    found = capacity(slots(1), jobs)
    assert (found.lacking, found.since, lacking(found)) == (0, None, {"any": 0} if jobs else {})


# --- by job, for the provisioner ------------------------------------------------------------------------
def node_slots(sid: str, count: int, pool: str, **more: Any) -> list[MeshSlot]:
    labels = (("pool", pool),)
    return [MeshSlot(slot=f"{sid}/{n}", node=sid, cluster="a", labels=labels, **more) for n in range(count)]


def demand(
    there: list[MeshSlot], queue: Iterable[QueuedJob], running: Iterable[ActiveJob] = (), **holds: Hold
) -> MachineDemand:
    facts = SlotFacts(table=SlotTable(there), queue=tuple(queue), running=tuple(running))
    return demand_of(facts, holds, (), NOW)


def lines(found: MachineDemand) -> list[tuple[str, int, int]]:
    return [(line.job, line.lacking, line.wished) for line in found.jobs]


def test_without_any_node_each_job_lacks_all_of_its_slots_first_come_first() -> None:
    found = demand(
        [], [waits("b", 2, since=5.0), waits("a", 3, since=1.0), waits("c", 1, since=9.0, priority=1)]
    )
    assert lines(found) == [("c", 1, 0), ("a", 3, 0), ("b", 2, 0)]
    assert found.nodes == ()


def test_the_first_job_has_the_free_slots_and_wishes_come_after_all_that_wait() -> None:
    elastic = waits("a", 2, since=1.0, replicas=Replicas(least=1, want=3, most=4))
    found = demand(slots(4), [elastic, waits("b", 3, since=2.0)])
    assert lines(found) == [("a", 0, 4), ("b", 1, 0)], "b lacks one; nothing is left of what a wishes"


def test_a_running_job_wishes_for_the_replicas_that_it_is_to_have() -> None:
    request = JobRequest(job="r", submitted_at=0.0, replica_slots=2, replicas=Replicas(want=3, most=3))
    runs_with_one = ActiveJob(request=request, replicas=1, slots=("n/0", "n/1"), started_at=0.0)
    found = demand([MeshSlot(slot=f"n/{n}", node="n") for n in range(3)], [], [runs_with_one])
    assert lines(found) == [("r", 0, 3)], "of four more slots one is free"
    assert found.jobs[0].reason == "is to have 3 replicas"
    parks = replace(runs_with_one, parks_at=NOW)
    assert lines(demand([], [], [parks])) == []


def test_what_waits_for_other_jobs_or_a_person_lacks_nothing() -> None:
    held = waits("h", 2, held="by a person")
    after = demand([], [waits("a", 2), held], a=Hold(cause=Cause.AFTER, reason="waits for j1"))
    assert lines(after) == []


@pytest.mark.parametrize(
    ("hold", "told"),
    [
        (None, True),
        (Hold(cause=Cause.ROOM, reason="needs 2 slots, 1 is free"), True),
        (Hold(cause=Cause.BEHIND, reason="behind j1", blocker="j1"), False),
        (Hold(cause=Cause.PLAN, reason="no cut fits"), False),
    ],
)
def test_a_job_that_is_about_to_take_free_slots_is_told_though_it_lacks_none(
    hold: Hold | None, told: bool
) -> None:
    found = demand(slots(2), [waits("a", 2)], **({} if hold is None else {"a": hold}))
    assert lines(found) == ([("a", 0, 0)] if told else [])
    assert all(line.waits for line in found.jobs)


def test_nodes_of_pools_are_listed_with_what_is_held_of_them() -> None:
    there = [*node_slots("a-m-1", 2, "cpu"), *node_slots("a-m-2", 1, "cpu", closed=True), *slots(1)]
    there.append(MeshSlot(slot="a-m-2/lane", node="a-m-2", lane=True, labels=(("pool", "cpu"),)))
    found = demand(there, [], [runs("j", ["a-m-1/0"]), runs("build", ["a-m-2/lane"])])
    assert [(use.sid, use.node, use.pool, use.slots, use.taken, use.cordoned) for use in found.nodes] == [
        ("a-m-1", "m-1", "cpu", 2, 1, False),
        ("a-m-2", "m-2", "cpu", 1, 1, True),
    ]


def test_a_pool_whose_slots_are_none_for_a_job_is_named() -> None:
    there = [*node_slots("a-m-1", 1, "small", memory_bytes=1 << 30), *node_slots("a-m-2", 1, "large")]
    found = demand(there, [waits("a", 3, SlotNeeds(memory_bytes=2 << 30))])
    assert [line.unfit_pools for line in found.jobs] == [("small",)]
