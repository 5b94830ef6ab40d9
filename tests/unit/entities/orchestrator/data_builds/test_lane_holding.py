"""What a build does with its lanes: it keeps them from unit to unit, and gives them up between two."""

from __future__ import annotations

from entities.orchestrator.data_builds.unit_ledger import AgentLoad
from schemas.data_set.builds import PhaseProgress
from schemas.usage import JobUsage
from tests.builders.queued_builds import BuildStandIn

LANES = ("a-n/0/lane", "b-n/0/lane", "a-n/1/lane")


def test_what_it_asks_for_is_what_its_file_says_and_the_phase_can_use() -> None:
    build = BuildStandIn({"min": 2, "want": 4, "max": 8}, priority=3, after=["j1"], wall_time_s=60)
    waiting = build.lanes.waiting
    assert waiting is not None
    request = waiting.request
    assert (request.replicas.least, request.replicas.want, request.replicas.most) == (2, 4, 8)
    assert (request.priority, request.after, request.wall_time_s, request.tenant) == (3, ("j1",), 60, "rita")
    build.lanes.settle(3)
    waiting = build.lanes.waiting
    assert waiting is not None
    assert (waiting.request.replicas.want, waiting.request.replicas.most) == (3, 3)
    build.lanes.settle(1)
    assert build.lanes.waiting is not None
    assert build.lanes.waiting.request.replicas.want == 2, "never below its minimum"


def test_a_number_of_replicas_is_the_most_and_it_starts_with_one() -> None:
    waiting = BuildStandIn(3).lanes.waiting
    assert waiting is not None
    assert (waiting.request.replicas.least, waiting.request.replicas.want) == (1, 3)


def test_units_go_to_the_nodes_of_its_lanes() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    everywhere = [AgentLoad(agent, 4, 2, 1.5) for agent in ("a-n", "b-n", "c-n")]
    assert build.lanes.loads(everywhere) == [AgentLoad("a-n", 2, 0, 1.5), AgentLoad("b-n", 1, 0, 1.5)]
    assert build.lanes.begin("b-n", "u1") == "b-n/0/lane"
    assert build.lanes.loads(everywhere)[1] == AgentLoad("b-n", 1, 1, 1.5)
    assert build.lanes.idle == 2
    assert build.lanes.begin("c-n", "u2") == "a-n/0/lane", (
        "one that failed elsewhere takes the place of a lane"
    )
    build.lanes.end("b-n/0/lane")
    assert build.lanes.idle == 2
    assert build.lanes.waiting is None


def test_a_lane_is_given_up_when_its_unit_has_ended() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    lane = build.lanes.begin("a-n", "u1")
    build.lanes.leave([lane, "b-n/0/lane"])
    assert set(build.held()) == {lane, "a-n/1/lane"}
    assert build.lanes.active.leaving == {lane}
    assert build.lanes.active.replicas == 1
    build.lanes.end(lane)
    assert build.held() == ("a-n/1/lane",)


def test_idle_lanes_come_last_for_they_leave_first() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    build.lanes.begin("b-n", "u1")
    assert build.held()[0] == "b-n/0/lane"


def test_lanes_that_are_not_open_any_more_get_no_other_unit() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    lane = build.lanes.begin("a-n", "u1")
    build.lanes.keep_to({"b-n/0/lane"})
    assert set(build.held()) == {lane, "b-n/0/lane"}
    build.lanes.keep_to({"b-n/0/lane", lane})
    build.lanes.end(lane)
    assert lane in build.held(), "it was opened again meanwhile"
    build.lanes.keep_to(())
    assert not build.lanes.holds
    waiting = build.lanes.waiting
    assert waiting is not None
    assert not waiting.request.held


def test_the_end_of_a_phase_gives_lanes_to_others() -> None:
    build = BuildStandIn({"min": 1, "want": 3})
    build.lanes.take(LANES)
    lane, changes = build.lanes.begin("a-n", "u1"), build.changes
    build.lanes.settle(8)
    assert (len(build.held()), build.changes) == (3, changes), "the queue is asked for nothing"
    build.lanes.settle(2)
    assert len(build.held()) == 2
    build.lanes.settle(1)
    assert build.held() == (lane,)
    assert build.changes > changes


def test_one_that_parks_ends_the_units_that_it_has_begun() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    lane = build.lanes.begin("a-n", "u1")
    assert build.lanes.give_way("parks for b2", held=False)
    assert build.held() == (lane,)
    assert (build.lanes.idle, build.lanes.parks, build.lanes.parked) == (0, "parks for b2", False)
    assert build.lanes.active.fixed
    build.lanes.end(lane)
    assert (build.lanes.holds, build.lanes.parked) == (False, True)
    assert build.lanes.waiting is not None
    build.lanes.take(LANES[:1])
    assert (build.lanes.idle, build.lanes.parks, build.lanes.parked) == (1, "", False)


def test_at_the_end_of_its_wall_time_it_waits_for_a_person() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    assert build.lanes.give_way("its wall time is over", held=True)
    waiting = build.lanes.waiting
    assert waiting is not None
    assert waiting.request.held == "its wall time is over"


def test_a_park_is_taken_back_before_it_has_come_about() -> None:
    build = BuildStandIn()
    build.lanes.take(LANES)
    lane = build.lanes.begin("a-n", "u1")
    build.lanes.park("parked by olga")
    build.lanes.go_on()
    build.lanes.end(lane)
    assert build.lanes.idle == 1


def test_its_use_of_lanes_is_counted_and_outlives_its_leader() -> None:
    build = BuildStandIn()
    usage = JobUsage(slot_s=40.0, held_s=20.0, slots=0, counted_at=1.0)
    phases = (PhaseProgress(phase="plan", units=1),)
    build.record = build.record.model_copy(update={"usage": usage, "phases": phases, "resumed_held_s": 5.0})
    waiting = build.lanes.waiting
    assert waiting is not None
    assert (waiting.attained_slot_s, waiting.ran_s, waiting.parked) == (40.0, 15.0, True)
    build.lanes.take(LANES)
    assert (build.record.usage.slots, build.record.usage.slot_s) == (3, 40.0)


def test_it_hears_once_why_it_waits() -> None:
    build, woken = BuildStandIn(), []
    build.lanes.wake = lambda: woken.append(build.lanes.reason)
    for reason in ("behind b2", "behind b2", "starts after j1 is done"):
        build.lanes.wait(reason, never=False)
    assert woken == ["behind b2", "starts after j1 is done"]
    build.lanes.wait("was to start after j1, which was not done", never=True)
    assert build.lanes.in_vain
