"""What a job does of what was adopted: windows and algorithms set and taken back, instances that migrate."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.membership.job_actions import JobActions
from entities.orchestrator.membership.job_changes import JobChanges
from entities.orchestrator.transaction.reduction_layout import ReductionLayouts
from schemas.actions import (
    Action,
    AvoidInstance,
    CheckpointNow,
    Migrate,
    MoveInstance,
    Recut,
    Scale,
    SetAlgorithm,
    SetRate,
    SetReduction,
    SetWeights,
    SetWindow,
)
from schemas.automation import Automation
from schemas.changes import ChangeState, Forecast, JobChange, JobObjective, StepUse
from schemas.errors import BadInput, Conflict
from schemas.job import JobState
from schemas.recut import Cuts, RecutAnswer, RecutJob, RecutRecord
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.step import Member
from tests.builders.graphs import graph, placement, topology, unit
from tests.builders.jobs import job as job_record
from tests.builders.jobs import step_result
from tests.job_context import job_context

UNITS = ("j-s0-r0", "j-s1-r0", "j-s1-r1")
BEFORE: Cuts = ((0, 2), (2, 6))
AFTER: Cuts = ((0, 3), (3, 6))
FASTER = Forecast.of(0.4, 0.3, cost_s=1.0, steps_left=100)


class Nobody:
    """A mesh without gateways and routers."""

    def gateways(self) -> tuple[str, ...]:
        return ()

    routers = gateways


class Job:
    """A running job of two stages; what is asked of its parts."""

    def __init__(self) -> None:
        self.told: list[JobChange] = []
        self.layouts = ReductionLayouts()
        self.recorded: tuple[JobChange, ...] = ()
        self.asked: list[str] = []
        self.step = 9
        self.obstacle = ""
        self.growth = ""
        self.replicas = 2
        self.automation = Automation.ACT
        self.on_growth: Any = None
        self.too_soon: Any = None
        self.fits = True
        self.looks = self.proposals = 0
        self.planned: list[asyncio.Task[None]] = []
        self.may_propose = asyncio.Event()
        self.may_propose.set()
        policies = PolicyDistribution(SimpleNamespace(), Nobody())  # type: ignore[arg-type]
        stages = tuple(StagePolicy(stage=stage, window=4) for stage in range(2))
        fields: dict[str, Any] = {"job": "j", "revision": 1, "entry_gateway": "g", "clusters": ("a",)}
        policies.issue(CommunicationPolicy(**fields, stages=stages, reason="initial"))
        self.policies = policies
        self.graph = graph(
            *map(unit, UNITS), placements=tuple(placement(sid, slot) for slot, sid in enumerate(UNITS))
        )
        record = job_record("j").model_copy(update={"state": JobState.RUNNING})
        self.context = job_context(
            record,
            mesh=SimpleNamespace(automation=Automation.ACT),
            policies=policies,
            instances=SimpleNamespace(graph=self.graph, layouts=self.layouts),
            events=SimpleNamespace(changing=self._changing),
            queue=SimpleNamespace(no_growth=lambda _: self.growth, again=self._again),
            tasks=SimpleNamespace(spawn=self._spawn),
        )
        self.changes = SimpleNamespace(on_hand_over=None, on_stay=None, migrate=self._migrate)
        self.rebalancing = SimpleNamespace(under_way="")
        self.recutting: Any = SimpleNamespace(
            under_way="", question=lambda message, topology: message, begin=self._recut
        )
        self.recuts: list[RecutJob] = []
        self.job_changes = JobChanges(self.context)
        place: Any = self
        self.actions = JobActions(
            self.context,
            place,
            place,
            place,
            largest_windows=lambda: {0: 8, 1: 4},
            topology=lambda: topology(),
            propose=self._propose,
        )

    def _again(self) -> None:
        self.looks += 1

    def _changing(self, change: JobChange, recorded: tuple[JobChange, ...]) -> None:
        self.told.append(change)
        self.recorded = recorded

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.planned.append(asyncio.create_task(work))

    def ask(self, by: str) -> None:
        self.asked.append(f"checkpoint for {by}")

    def grown(self, before: int, after: int, step_s: float) -> Forecast:
        return Forecast.of(step_s, step_s * before / after, cost_s=0.0, steps_left=0)

    def change_size(self, replicas: int, why: str) -> bool:
        self.asked.append(f"{replicas} replicas: {why}")
        if self.fits:
            self.replicas = replicas
        return self.fits

    def prefer(self, replicas: int | None) -> None:
        self.asked.append(f"prefers {replicas}")

    async def _propose(self, question: Any) -> Any:
        if question.cuts == ((0, 9),):
            raise BadInput("the plan is of another model")
        self.proposals += 1
        await self.may_propose.wait()
        return "proposed", question.cuts

    def _recut(self, message: RecutJob, given: object) -> RecutAnswer:
        if not message.dry_run:
            self.recuts.append(message)
        plan = 2 + len(self.recuts)
        return RecutAnswer(job="j", plan=plan, before=BEFORE, cuts=message.cuts or AFTER, note="")

    def in_force(self, before: Cuts, cuts: Cuts) -> None:
        message, plan = self.recuts[-1], 2 + len(self.recuts)
        record = RecutRecord(plan=plan, by=message.user, before=before, cuts=cuts, step=self.step)
        self.recutting.on_in_force(record)

    def _migrate(self, sid: str, node: str | None) -> str:
        self.asked.append(f"{sid} to {node}")
        return self.obstacle

    def steps(self, count: int, step_s: float, *sids: str) -> None:
        for _ in range(count):
            result = step_result(self.step, step_s=step_s, shares=dict.fromkeys(sids or UNITS, 2))
            self.step += 1
            self.job_changes.decided(result, last=False)

    async def cut(self, action: Recut) -> int | None:
        await self.actions.look(action)
        return self.do(action)

    def do(self, action: Action) -> int | None:
        return self.actions.carry_out(action, "m", 60.0, "why")


def measured() -> Job:
    """A job of which eight steps of 0.4 s are known."""
    job = Job()
    job.steps(8, 0.4)
    return job


WINDOW = SetWindow(stage=0, in_flight=6, forecast=FASTER)
ALGORITHM = SetAlgorithm(algorithm="round-robin", forecast=FASTER)


async def test_a_window_that_was_no_better_is_set_back_once_and_not_tried_again() -> None:
    job = measured()
    assert job.do(WINDOW) == 2
    assert job.policies.windows() == {0: 6, 1: 4}
    job.steps(10, 0.4)
    assert [change.state for change in job.told] == [
        ChangeState.UNDER_WAY,
        ChangeState.IN_EFFECT,
        ChangeState.NO_BETTER,
    ]
    assert job.policies.windows() == {0: 4, 1: 4}
    assert job.actions.freed() == [("window of stage 0", "m")]
    assert job.actions.freed() == []
    job.steps(20, 0.4)
    with pytest.raises(Conflict, match=r"was tried at step 17 \(no_better: 0.400 → 0.400 s a step\)"):
        job.do(WINDOW)


async def test_what_helped_stays_until_it_lapses() -> None:
    job = measured()
    job.do(ALGORITHM)
    job.steps(10, 0.3)
    assert job.told[-1].state is ChangeState.BETTER
    assert job.policies.policy is not None
    assert job.policies.policy.algorithm == "round-robin"
    job.actions.release("algorithm")
    assert job.policies.policy.algorithm == "expected-completion"


async def test_a_rate_that_saves_what_its_objective_counts_stays_and_lapses() -> None:
    uses = {JobObjective.ENERGY: StepUse(before=40.0, after=20.0)}
    calm = Forecast.of(0.4, 0.6, cost_s=0, steps_left=99, objective=JobObjective.ENERGY, uses=uses)
    job = measured()
    job.do(SetRate(per_s=12.0, forecast=calm))
    assert job.policies.admitted_per_s == 12.0
    job.steps(10, 0.62)
    last = job.told[-1]
    assert (last.kind, last.state, last.what) == (
        ("rate", ChangeState.BETTER, "admission rate: no limit → 12 microbatches a second")
    )
    assert last.direction == "lower admission rate"
    job.actions.release("admission rate")
    assert job.policies.admitted_per_s == 0


async def test_a_reduction_has_its_layout_from_the_next_generation_on_and_goes_back_if_it_was_no_better() -> (
    None
):
    two = [Member(sid=sid, incarnation="i") for sid in ("j-s1-r0", "j-s1-r1")]
    job = Job()
    relaid: list[int] = []
    job.layouts.on_change = relaid.append
    job.steps(8, 0.4)
    assert job.layouts.of(1, 3).sizes(two) == ()
    job.do(SetReduction(stage=1, parts={"j-s1-r0": 3.0}, order=("j-s1-r1",), forecast=FASTER))
    assert job.layouts.of(1, 3).sizes(two) == (), "all of a generation know the same"
    layout = job.layouts.of(1, 4)
    assert layout.ordered(two) == (two[1], two[0])
    assert layout.sizes(layout.ordered(two)) == (1.0, 3.0)
    assert job.told[-1].what == "reduction of stage 1: equal parts → j-s1-r0 3 in the order j-s1-r1"
    job.steps(10, 0.4)
    assert job.told[-1].state is ChangeState.NO_BETTER
    assert job.layouts.of(1, 5).ordered(two) == tuple(two)
    assert relaid == [1, 1]


async def test_weights_hold_no_change_back_and_end_where_they_were_no_better() -> None:
    weights = SetWeights(stage=1, weights={"j-s1-r0": 2.0, "j-s1-r1": 1.0}, forecast=FASTER)
    job = measured()
    job.actions.routed(weights, "m")
    job.steps(10, 0.41)
    last = job.told[-1]
    assert (last.kind, last.state, last.to_stage) == ("weights", ChangeState.NO_BETTER, 1)
    assert last.what == "weights of stage 1: j-s1-r0 2, j-s1-r1 1"
    assert job.actions.freed() == [("weights of stage 1", "m")]
    assert job.actions.routes_objection(weights, "m").startswith("was tried at step 17 (no better: ")
    assert job.actions.routes_objection(weights.model_copy(update={"forecast": None}), "m") == ""

    job.actions.routed(weights, "n")
    job.do(WINDOW)
    assert [(change.kind, change.state, change.note) for change in job.told[-2:]] == [
        ("weights", ChangeState.UNDONE, "not judged: window of stage 0: 4 → 6 came after it"),
        ("window", ChangeState.UNDER_WAY, ""),
    ]
    job.actions.routed(AvoidInstance(sid="j-s1-r0", forecast=FASTER), "m")
    assert job.told[-1].note == "not judged: window of stage 0: 4 → 6 is not judged yet"
    assert sorted(change.kind for change in job.recorded) == ["avoidance", "weights", "weights", "window"]


async def test_routes_without_a_forecast_and_routes_that_end_leave_no_verdict_on_others() -> None:
    weights = SetWeights(stage=1, weights={"j-s1-r0": 2.0, "j-s1-r1": 1.0}, forecast=FASTER)
    job = measured()
    job.actions.routed(weights, "m")
    job.steps(4, 0.4)
    job.actions.routed(AvoidInstance(sid="j-s1-r0"), "n")
    last = job.told[-1]
    assert (last.state, last.note) == (
        ChangeState.UNDONE,
        "not judged: route to j-s1-r0 by n came after it, 4 steps later",
    )
    job.steps(8, 0.5)
    job.actions.unrouted("route to j-s1-r0", "n")
    job.actions.routed(weights, "m")
    assert job.told[-1].note == "not judged: only 0 steps are known to compare with"
    job.steps(20, 0.4)
    assert job.actions.freed() == []


async def test_where_automation_no_longer_acts_nothing_is_taken_back_any_more() -> None:
    job = measured()
    job.do(Scale(replicas=3, forecast=FASTER))
    job.context.mesh.automation = Automation.ADVISE
    job.steps(10, 0.4)
    assert job.told[-1].state is ChangeState.NO_BETTER
    assert job.asked == ["3 replicas: m: why", "prefers 3"]


async def test_one_change_at_a_time() -> None:
    job = measured()
    job.do(WINDOW)
    with pytest.raises(Conflict, match="window of stage 0: 4 → 6 is not judged yet"):
        job.do(ALGORITHM)


async def test_a_window_larger_than_memory_is_refused_in_one_line() -> None:
    job = measured()
    with pytest.raises(Conflict, match="9 microbatches in flight in stage 0: its instances may hold 8"):
        job.do(SetWindow(stage=0, in_flight=9, forecast=FASTER))


async def test_a_migration_counts_from_the_moment_at_which_the_instance_leaves() -> None:
    job = measured()
    job.do(Migrate(sid="j-s1-r1", node="agent-b", forecast=FASTER))
    assert job.asked == ["j-s1-r1 to agent-b"]
    assert job.told == []
    assert job.changes.on_hand_over is not None
    job.changes.on_hand_over("j-s1-r1")
    job.steps(2, 0.5, "j-s0-r0", "j-s1-r0")
    job.steps(10, 0.3)
    last = job.told[-1]
    assert (last.kind, last.state, last.before_s, last.after_s) == ("migrate", ChangeState.BETTER, 0.4, 0.3)
    assert last.cost_s == pytest.approx(0.2)


async def test_an_instance_that_leaves_after_its_migration_was_dropped_does_not_leave_for_the_module() -> (
    None
):
    job = measured()
    job.do(Migrate(sid="j-s1-r1", forecast=FASTER))
    job.changes.on_stay("j-s1-r1")
    job.changes.on_hand_over("j-s1-r1")  # a person drains its node
    assert job.told == []


async def test_a_migration_without_room_is_declined() -> None:
    job = measured()
    job.obstacle = "no free slot"
    with pytest.raises(Conflict, match="j-s1-r1 does not leave its slot: no free slot"):
        job.do(Migrate(sid="j-s1-r1", forecast=FASTER))


async def test_replicas_that_brought_nothing_are_given_back() -> None:
    job = measured()
    job.do(Scale(replicas=3, forecast=FASTER))
    job.steps(10, 0.4)
    assert job.asked == [
        "3 replicas: m: why",
        "prefers 3",
        "prefers None",
        "prefers 2",
        "2 replicas: orchestrator: 3 replicas were no better",
    ]


async def test_a_job_does_not_grow_while_another_waits_or_there_is_no_room() -> None:
    job = measured()
    job.growth = "job k waits for slots"
    with pytest.raises(Conflict, match="job k waits for slots"):
        job.do(Scale(replicas=3, forecast=FASTER))
    job.growth, job.fits = "", False
    with pytest.raises(Conflict, match="3 replicas: there is no room for them"):
        job.do(Scale(replicas=3, forecast=FASTER))
    assert job.told == []


async def test_only_a_running_job_does_anything() -> None:
    job = Job()
    record = job.context.store.record.model_copy(update={"state": JobState.RECOVERING})
    job.context.store.record = record
    with pytest.raises(Conflict, match="the job is recovering"):
        job.do(CheckpointNow())
    job.context.store.record = record.model_copy(update={"state": JobState.RUNNING})
    job.do(CheckpointNow())
    assert job.asked == ["checkpoint for m"]


async def test_a_cut_is_judged_from_the_moment_at_which_it_is_in_force_and_taken_back_if_it_was_worse() -> (
    None
):
    job = measured()
    await job.cut(Recut(cuts=AFTER, revision=2, forecast=FASTER))
    assert job.proposals == 1
    assert (job.recuts[0].cuts, job.recuts[0].user) == (AFTER, "m")
    assert job.told == []
    job.steps(3, 0.4)  # it is prepared
    job.in_force(BEFORE, AFTER)
    job.may_propose.clear()
    job.steps(10, 0.6)
    assert [(change.kind, change.state.value) for change in job.told] == [
        ("recut", "under_way"),
        ("recut", "in_effect"),
        ("recut", "no_better"),
    ]
    assert job.told[-1].forecast == FASTER
    assert (job.told[-1].before_s, job.told[-1].after_s) == (0.4, 0.6)
    assert len(job.recuts) == 1, "what it was is planned beside the loop"
    job.may_propose.set()
    await job.planned[-1]
    back = job.recuts[-1]
    assert (back.cuts, back.user, back.revision) == (BEFORE, "orchestrator", 3)
    job.in_force(AFTER, BEFORE)
    assert job.told[-1].takes_back
    assert job.actions.freed() == [("cut", "m")]
    job.steps(30, 0.4)
    with pytest.raises(Conflict, match=r"was tried at step 20 \(no_better: 0.400 → 0.600 s a step\)"):
        job.do(Recut(cuts=AFTER, forecast=FASTER))


async def test_cuts_are_looked_at_side_by_side_and_one_is_not_taken_back_after_a_move_came() -> None:
    job = measured()
    first, second = (Recut(cuts=AFTER, revision=2, forecast=FASTER) for _ in range(2))
    for action in (first, second):
        await job.actions.look(action)
    job.do(first)
    job.in_force(BEFORE, AFTER)
    job.may_propose.clear()
    job.steps(10, 0.6)
    job.rebalancing.under_way = "j-s1-r0"
    job.may_propose.set()
    await job.planned[-1]
    assert (job.proposals, len(job.recuts)) == (3, 1)


async def test_a_persons_cut_is_theirs_once_it_is_in_force_and_not_if_it_is_given_up() -> None:
    job, kept = Job(), list[tuple[str, str | None, str]]()
    job.actions.on_set = lambda knob, value, by: kept.append((knob, value, by))
    job.actions.asked_by_person(3, "rita")
    record = RecutRecord(plan=3, by="rita", before=BEFORE, cuts=AFTER, step=9)
    job.recutting.on_dropped(record)
    assert (kept, job.actions.freed(), job.looks) == ([], [], 1)
    job.actions.asked_by_person(4, "rita")
    job.recutting.on_in_force(record.model_copy(update={"plan": 4}))
    assert kept == [("cut", "plan 4", "rita")]


async def test_slots_that_the_queue_gives_are_given_back_if_they_bring_nothing() -> None:
    job = Job()
    job.steps(3, 0.4)
    assert job.too_soon() == "only 3 steps by this crew are known: nothing to compare with"
    job.steps(5, 0.4)
    assert job.too_soon() == ""
    job.replicas = 3
    job.on_growth(2, 3, job.graph)
    assert job.told[-1].replicas == (2, 3)
    assert job.told[-1].forecast == Forecast.of(0.4, 0.4 * 2 / 3, cost_s=0.0, steps_left=0)
    assert job.too_soon() == "replicas: 2 → 3 is not judged yet"
    job.steps(10, 0.4)
    assert job.told[-1].state is ChangeState.NO_BETTER
    assert job.asked == ["prefers 2", "2 replicas: orchestrator: 3 replicas were no better"]


async def test_where_automation_is_off_growth_is_not_judged() -> None:
    job = measured()
    job.automation = Automation.OFF
    job.on_growth(2, 3, job.graph)
    assert job.told == []


async def test_a_plan_for_another_model_and_a_job_whose_automation_has_no_analysis_are_one_line_each() -> (
    None
):
    job = measured()
    with pytest.raises(Conflict, match="the plan is of another model"):
        await job.cut(Recut(cuts=((0, 9),), forecast=FASTER))
    with pytest.raises(Conflict, match="the job has just changed, or another re-cut is looked at"):
        job.do(Recut(cuts=AFTER, forecast=FASTER))
    job.recutting.under_way = "plan 3 (0-2,3-5) is being prepared, as ada wanted"
    with pytest.raises(Conflict, match=r"plan 3 .* is being prepared, as ada wanted"):
        job.do(WINDOW)
    with pytest.raises(Conflict, match=r"plan 3 .* is being prepared, as ada wanted"):
        await job.cut(Recut(cuts=AFTER, forecast=FASTER))
    assert job.proposals == 0, "nothing is looked for that is declined anyway"


async def test_what_was_adopted_and_has_not_begun_is_waited_for() -> None:
    job = measured()
    job.do(Migrate(sid="j-s1-r1", forecast=FASTER))
    for other in (
        WINDOW,
        Recut(cuts=AFTER, forecast=FASTER),
        MoveInstance(sid="j-s1-r0", stage=0, forecast=FASTER),
    ):
        with pytest.raises(Conflict, match="j-s1-r1 is about to leave its slot"):
            job.do(other)
    assert job.too_soon() == "j-s1-r1 is about to leave its slot"
    job.looks = 0
    job.changes.on_stay("j-s1-r1")  # it stays: there was no room any more
    assert (job.actions.under_way, job.looks) == ("", 1)
    job.rebalancing.under_way = "j-s1-r0"
    with pytest.raises(Conflict, match="j-s1-r0 is changing its stage"):
        job.do(Recut(cuts=AFTER, forecast=FASTER))
