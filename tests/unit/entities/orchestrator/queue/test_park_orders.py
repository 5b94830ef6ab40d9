"""Jobs that are told to park: once, in time, and not if nobody needs their slots any more."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from schemas.job import JobState
from tests.builders.graphs import node, placement
from tests.builders.jobs import job as job_record
from tests.builders.queue_runs import Over, Run, heard, mesh_of, notice_of, queue_of
from tests.patience import NEVER_S
from tests.waiting import eventually


async def test_a_job_parks_once_for_one_with_a_stronger_claim() -> None:
    mesh = await mesh_of(node("a", slots=1))
    low, high = Run("low", 1, 0.0), Run("high", 1, 1.0)
    low.placements = [placement("low", 0)]
    high.request = replace(high.request, priority=1)
    async with queue_of(mesh, low, high, order="priority"):
        await heard(high, "waits for the exit of those who make room for it")
        await mesh.nudge()
        low.placements = []
        low.request = replace(low.request, held="parked")
        await mesh.nudge()
        await heard(high, "high")
    assert low.gave_way == [("parks for high", False)]


async def test_a_job_is_told_before_it_parks_and_goes_on_if_nobody_needs_its_slots_any_more() -> None:
    mesh = await mesh_of(node("a", slots=1))
    low, high, higher = Run("low", 1, 0.0), Run("high", 1, 1.0), Run("higher", 1, 2.0)
    low.placements = [placement("low", 0)]
    low.request = replace(low.request, notice_s=NEVER_S)
    high.request = replace(high.request, priority=1)
    higher.request = replace(higher.request, priority=2, held="held")
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (low, high, higher)}
    async with queue_of(mesh, low, high, higher, order="priority") as queue:
        await heard(high, "waits for the exit of those who make room for it")
        assert re.fullmatch(r"parks at \S+ UTC, unless it ends before: parks for high", low.notices[-1])
        (notice,) = (await queue.status(records, None)).notices
        assert (notice.job, notice.blocker) == ("low", "high")
        assert notice.at > time.time() + NEVER_S / 2
        high.request = replace(high.request, held="parked by rita")
        low.request = replace(low.request, notice_s=0.05)
        queue.again()
        await heard(high, "parked by rita")
        assert low.notices[-1] == "does not park: high needs its slots no more"
        higher.request = replace(higher.request, held="")
        queue.again()
        await heard(higher, "waits for the exit of those who make room for it")
        assert "unless it ends before: parks for higher" in low.notices[-1]

        async def gave_way() -> bool:
            return bool(low.gave_way)

        await eventually(gave_way, every_s=0.01)  # by the queue's own clock: nothing else happens
        assert low.gave_way == [("parks for higher", False)]


async def test_the_order_of_a_job_that_a_person_resumes_or_parks_is_forgotten() -> None:
    mesh = await mesh_of(node("a", slots=1))
    over, late = Run("over", 1, 0.0), Run("late", 1, 1.0)
    over.placements = [placement("over", 0)]
    over.request = replace(over.request, wall_time_s=1.0)
    over.ran_s = 1.0
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (over, late)}
    async with queue_of(mesh, over, late, order="priority") as queue:
        await eventually(notice_of(queue, records), every_s=0.01)
        queue.again()
        await heard(late, "waits for the exit of those who make room for it")
        assert [held for _, held in over.gave_way] == [True]
        over.request = replace(over.request, wall_time_s=None)
        queue.goes_on("over")  # before it has come to rest
        status = await queue.status(records, None)
        assert not status.notices
        assert [place.cause for place in status.jobs] == ["room"]
        over.request = replace(over.request, notice_s=NEVER_S)
        late.request = replace(late.request, priority=1)
        queue.again()
        await eventually(notice_of(queue, records), every_s=0.01)
        over.record = over.record.model_copy(update={"held": "parked by olga"})
        told = len(over.notices)
        queue.again()
        await eventually(notice_of(queue, records, there=False), every_s=0.01)
        assert len(over.notices) == told, "its record says who parked it"


async def test_a_job_that_has_parked_at_the_end_of_its_wall_time_is_under_no_notice() -> None:
    mesh = await mesh_of(node("a", slots=1))
    over, late = Over("over", 1, 0.0), Run("late", 1, 1.0)
    over.placements = [placement("over", 0)]
    over.request = replace(over.request, wall_time_s=1.0)
    over.ran_s = 1.0
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (over, late)}
    async with queue_of(mesh, over, late) as queue:
        await eventually(notice_of(queue, records), every_s=0.01)
        over.placements = []
        await mesh.nudge()
        await heard(late, "late")
        assert not (await queue.status(records, None)).notices


async def test_a_question_about_the_queue_changes_nothing() -> None:
    """Not even if a job has lost its slots since the last decision."""
    mesh = await mesh_of(node("a", slots=1))
    low, high = Run("low", 1, 0.0), Run("high", 1, 1.0)
    low.placements = [placement("low", 0)]
    low.request = replace(low.request, notice_s=NEVER_S)
    high.request = replace(high.request, priority=1)
    records = {run.name: job_record(run.name, JobState.QUEUED) for run in (low, high)}
    async with queue_of(mesh, low, high, order="priority") as queue:
        await eventually(notice_of(queue, records), every_s=0.01)
        places, low.placements = low.placements, []
        await queue.capacity()
        low.placements = places
        assert len((await queue.status(records, None)).notices) == 1
