"""The queue's decisions, carried out in virtual time."""

from __future__ import annotations

import pytest

from entities.queue.queue_rules import QueueOrder, QueueRules
from entities.queue.queued_job import JobRequest, Replicas
from entities.queue.scheduling import QueueSurroundings
from entities.queue.slot_pools import MeshSlot, SlotTable
from entities.queue.virtual_queue import TraceJob, VirtualQueue


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


def test_a_job_that_parks_and_comes_back_has_all_its_work_left_to_do() -> None:
    """The end that was planned for its first run is not the end of its second one."""
    rules = QueueRules(order=QueueOrder.PRIORITY, cool_down_s=0.0)
    table = SlotTable([MeshSlot(slot="s", node="n")])
    ahead = VirtualQueue(around=QueueSurroundings(table=table, rules=rules))
    long = JobRequest(job="long", submitted_at=0.0)
    brief = JobRequest(job="brief", submitted_at=100.0, priority=3)
    ahead.submit([TraceJob(request=long, work_s=1000.0), TraceJob(request=brief, work_s=300.0)])
    ahead.run()
    times = ahead.times
    assert ahead.courses["brief"].ended_at == pytest.approx(100.0 + times.park_s + 300.0)
    assert ahead.courses["long"].ended_at == pytest.approx(1300.0 + times.park_s + times.start_s)
    assert ahead.courses["long"].parks == 1
