"""Builds in the one queue: they get lanes, give them up, and jobs and builds wait for each other."""

from __future__ import annotations

import pytest

from entities.orchestrator.queue.job_queue import JobQueue, unknown
from entities.queue.queued_job import JobRequest
from schemas.data_set.builds import BuildState
from schemas.errors import Conflict
from schemas.job import JobState
from tests.builders.graphs import node, placement
from tests.builders.jobs import job as job_record
from tests.builders.queue_runs import Run, heard, mesh_of, queue_of
from tests.builders.queued_builds import BuildStandIn
from tests.waiting import eventually


def enter(queue: JobQueue, *builds: BuildStandIn) -> None:
    for build in builds:
        build.queue_again = queue.again
        queue.builds.enter(build.lanes)


def lanes_of(*agents: str) -> set[str]:
    return {f"{agent}/lane" for agent in agents}


async def test_a_lone_build_has_its_lanes_at_once() -> None:
    mesh = await mesh_of(node("a", slots=2), node("b", slots=2))
    async with queue_of(mesh) as queue:
        build = BuildStandIn(3)
        enter(queue, build)
        await eventually(lambda: len(build.held()) == 3)
        assert {lane[0] for lane in build.held()} == {"a", "b"}, "over all nodes"


async def test_a_build_takes_no_slot_and_leaves_lanes_whose_slots_compute() -> None:
    mesh = await mesh_of(node("a", slots=3))
    job = Run("j", 3, 1.0)
    async with queue_of(mesh) as queue:
        build = BuildStandIn(3)
        enter(queue, build)
        await eventually(lambda: len(build.held()) == 3)
        busy = build.lanes.begin("a-n", "u1")
        await mesh.node(node("a", slots=3, busy=3))
        await eventually(lambda: set(build.held()) == {busy, *lanes_of("a-n/0")})
        assert queue.occupied("") == {}, "lanes take no slots"
        await mesh.node(node("a", slots=3))
        await eventually(lambda: len(build.held()) == 3)
    assert job.plans == 0


async def test_builds_share_lanes_and_the_second_starts_beside_the_first() -> None:
    mesh = await mesh_of(node("a", slots=4))
    async with queue_of(mesh) as queue:
        first, other = BuildStandIn(8, "b00000a"), BuildStandIn({"min": 2, "want": 2}, "b00000b")
        enter(queue, first)
        await eventually(lambda: len(first.held()) == 4)
        busy = first.lanes.begin("a-n", "u1")
        enter(queue, other)
        await eventually(lambda: len(other.held()) == 2)
        assert busy in first.held()
        assert not set(first.held()) & set(other.held())
        queue.builds.leave("b00000b")
        other.lanes.clear()
        await eventually(lambda: len(first.held()) == 4)


async def test_who_waits_is_listed_with_its_reason_and_explained() -> None:
    mesh = await mesh_of(node("a", slots=1, busy=1))
    holder = BuildStandIn({"min": 1, "want": 1}, "b00000a")
    waiting, job = BuildStandIn(1, "b00000b"), Run("j", 1, 1.0)
    async with queue_of(mesh, job) as queue:
        enter(queue, holder)
        await eventually(lambda: holder.lanes.holds)
        enter(queue, waiting)
        await eventually(lambda: bool(waiting.lanes.reason))
        assert (
            waiting.lanes.reason == "needs 1 lanes, 0 of 1 free: waiting for a job to end or a node to join"
        )
        status = await queue.status({"j": job.record}, None)
        rows = {place.job: (place.work, place.slots, place.user) for place in status.jobs}
        assert rows["b00000b"] == ("preparation", 1, "rita")
        assert rows["j"][0] == "training"
        assert (status.slots, status.free, status.waiting) == (1, 0, 2)
        assert not any(demand.jobs > 1 for demand in status.demands), "builds want no nodes"
        explained = await queue.status({}, "b00000b")
        assert [place.job for place in explained.jobs] == ["b00000b"]
        with pytest.raises(Conflict, match="build b00000a does not wait for lanes: queued"):
            await queue.status({}, "b00000a")


async def test_a_held_build_waits_for_a_person() -> None:
    mesh = await mesh_of(node("a", slots=1))
    async with queue_of(mesh) as queue:
        build = BuildStandIn(1)
        build.hold("held by rita: queue.hold")
        enter(queue, build)
        await eventually(lambda: build.lanes.reason == "held by rita: queue.hold")
        build.hold("")
        queue.goes_on("b1a2b3")
        await eventually(lambda: build.lanes.holds)


async def test_a_job_starts_after_its_build_and_a_build_after_its_job() -> None:
    mesh = await mesh_of(node("a", slots=1))
    job, there, ended = Run("j", 1, 1.0), dict[str, Run](), dict[str, object]()
    build, next_build = BuildStandIn(1, "b00000a"), BuildStandIn(1, "b00000b", after=["j"])
    job.request = JobRequest(job="j", submitted_at=1.0, after=("b00000a",))
    builds_ended = dict[str, object]()
    async with queue_of(mesh, job, there=there, ended=ended) as queue:
        queue.builds.ended = builds_ended  # type: ignore[assignment]
        enter(queue, build, next_build)
        await heard(job, "starts after b00000a is done")
        await eventually(lambda: next_build.lanes.reason == "starts after j is done")
        builds_ended["b00000a"] = build.record.model_copy(update={"state": BuildState.DONE})
        queue.builds.leave("b00000a")
        await heard(job, "j")
        job.placements = [placement("j", 0)]
        ended["j"] = job_record("j", JobState.DONE)
        del there["j"]
        await mesh.nudge()
        await eventually(lambda: next_build.lanes.holds)


async def test_who_comes_after_a_build_that_failed_waits_in_vain() -> None:
    mesh = await mesh_of(node("a", slots=1))
    job, build = Run("j", 1, 1.0), BuildStandIn(1, "b00000b", after=["b00000a"])
    job.request = JobRequest(job="j", submitted_at=1.0, after=("b00000a",))
    failed = BuildStandIn(1, "b00000a").record.model_copy(update={"state": BuildState.FAILED})
    async with queue_of(mesh, job) as queue:
        queue.builds.ended = {"b00000a": failed}
        enter(queue, build)
        await heard(job, "was to start after b00000a, which was not done")
        assert job.heard[-1].never
        await eventually(lambda: build.lanes.in_vain)


async def test_a_new_leader_waits_for_builds_that_it_has_not_read_yet() -> None:
    mesh = await mesh_of(node("a", slots=1))
    job, ended = Run("j", 1, 1.0), BuildStandIn(1, "b00000a").record
    job.request = JobRequest(job="j", submitted_at=1.0, after=("b00000a",))
    async with queue_of(mesh, job) as queue:
        queue.taking_over = True
        await heard(job, "starts after b00000a is done")
        queue.builds.ended = {"b00000a": ended.model_copy(update={"state": BuildState.DONE})}
        queue.taking_over = False
        queue.again()
        await heard(job, "j")


def test_an_id_that_nobody_knows_is_named_with_the_list_to_look_at() -> None:
    assert unknown("b1a2b3") == "no build b1a2b3: `dmsc data list` shows them"
    assert unknown("r1a2b3c") == "no array r1a2b3c: `dmsc jobs` lists them"
    assert unknown("j1a2b3") == "no job j1a2b3: `dmsc jobs` lists their ids"
