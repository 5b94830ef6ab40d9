"""10,000 random events in virtual time: no partial gang, no slot twice, no deadlock, every job starts."""

from __future__ import annotations

import math
import random

import pytest

from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from entities.queue.queued_job import JobRequest, Replicas
from entities.queue.reservations import SlotReservation
from entities.queue.scheduling import QueueSurroundings
from entities.queue.slot_pools import MeshSlot, SlotNeeds, SlotTable
from entities.queue.tenant_shares import TenantQuota
from entities.queue.virtual_queue import TraceJob, VirtualQueue

SLOTS = 24


def random_job(number: int, at: float, draw: random.Random) -> TraceJob:
    least = draw.choice((1, 1, 1, 2, 3))
    want = least + draw.choice((0, 0, 1, 3))
    needs = SlotNeeds(kind="cuda") if draw.random() < 0.2 else SlotNeeds()
    request = JobRequest(
        job=f"job-{number:05}",
        submitted_at=at,
        tenant=draw.choice("xyz"),
        priority=draw.randrange(4),
        replicas=Replicas(least=least, want=want, most=want + draw.choice((0, 0, 6))),
        replica_slots=draw.choice((1, 1, 2)),
        other_slots=draw.choice((0, 0, 0, 1)),
        needs=needs,
        deadline=at + 4000 if draw.random() < 0.1 else None,
        after=(f"job-{draw.randrange(number):05}",) if number and draw.random() < 0.1 else (),
        array=(array := draw.choice(("", "", "", "sweep"))),
        array_limit=2 if array else 0,
    )
    return TraceJob(request=request, work_s=draw.lognormvariate(5, 1.2), estimate=draw.uniform(0.5, 3))


@pytest.mark.parametrize("order", QueueOrder)
def test_ten_thousand_random_events(order: QueueOrder) -> None:
    seed = 1
    print(f"seed {seed}")
    draw = random.Random(f"{seed} {order}")
    kinds = ["cuda" if number < 10 else "cpu" for number in range(SLOTS)]
    table = SlotTable(
        MeshSlot(slot=f"s{number}", node=f"n{number // 4}", kind=kind) for number, kind in enumerate(kinds)
    )
    jobs, at = [], 0.0
    for number in range(2700):
        at += draw.expovariate(1 / 60)
        jobs.append(random_job(number, at, draw))
    requests = {job.request.job: job.request for job in jobs}
    reservations = tuple(
        SlotReservation(name=f"r{number}", start_at=start, end_at=start + 900, count=4, tenant=tenant)
        for number, (start, tenant) in enumerate(((3000.0, "x"), (9000.0, ""), (15000.0, "y")))
    )
    rules = QueueRules(
        order=order,
        ageing_s=3600,
        cool_down_s=draw.choice((60, 300)),
        notice_s=draw.choice((0, 20)),
        service_levels_slot_s=(200, 1000, 5000),
        backfill=draw.choice((Backfill.EASY, Backfill.EASY, Backfill.NONE)),
    )
    quotas = (
        {"x": TenantQuota(slots=8), "y": TenantQuota(slots=8, most=20)}
        if order in (QueueOrder.FAIR, QueueOrder.PRIORITY)
        else {}
    )
    ahead = VirtualQueue(
        around=QueueSurroundings(table=table, rules=rules, reservations=reservations, quotas=quotas)
    )
    last_park: dict[str, float] = {}
    events = 0

    def watch(now: float, decision: object) -> None:
        for park in decision.parks:  # type: ignore[attr-defined]
            if "reservation" not in park.reason:
                assert now - last_park.get(park.job, -math.inf) >= rules.cool_down_s, (seed, park)
            last_park[park.job] = now

    ahead.watch = watch
    ahead.submit(jobs)
    while ahead.pending:
        ahead.step()
        events += 1
        holders = ahead.holders
        held = [slot for slots in holders.values() for slot in slots]
        assert len(held) == len(set(held)), (seed, "a slot twice")
        for name, slots in holders.items():
            request, replicas = requests[name], ahead.replicas_of(name)
            assert request.replicas.least <= replicas <= request.replicas.most, (seed, name)
            assert len(slots) >= request.slots(replicas), (seed, name, "a partial gang")
            assert all(request.needs.admit(table.slots[table.index[slot]]) for slot in slots), (seed, name)
        if draw.random() < 0.02 and ahead.waiting:
            ahead.hold(held_job := draw.choice(ahead.waiting), True)
            ahead.step()
            ahead.hold(held_job, False)
    assert events >= 10_000
    unfinished = [name for name, course in ahead.courses.items() if course.ended_at is None]
    assert unfinished == [], (seed, order)


def test_a_job_parks_at_the_end_of_its_wall_time_though_it_has_shrunk_after_its_notice() -> None:
    table = SlotTable(MeshSlot(slot=f"s{number}", node="n") for number in range(4))
    long = JobRequest(
        job="long",
        submitted_at=0.0,
        replicas=Replicas(least=1, want=4, most=4),
        wall_time_s=1000.0,
        notice_s=1000.0,
    )
    brief = JobRequest(job="brief", submitted_at=100.0, replicas=Replicas(least=2, want=2, most=2))
    ahead = VirtualQueue(around=QueueSurroundings(table=table))
    ahead.submit([TraceJob(request=long, work_s=1e6), TraceJob(request=brief, work_s=50.0)])
    ahead.run(lambda: "long" in ahead.waiting)
    assert ahead.courses["brief"].ended_at == pytest.approx(100.0 + ahead.times.shrink_s + 50.0)
    assert ahead.now == pytest.approx(1000.0 + ahead.times.park_s)
    waiting, _ = ahead.snapshot()
    assert [job.request.held for job in waiting] == ["held"]
