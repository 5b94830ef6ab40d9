"""How a move between stages is carried out: a departure, another unit in the slot, a join; or back again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.retry_limits import Unrecoverable
from entities.orchestrator.membership.job_changes import JobChanges
from entities.orchestrator.membership.rebalancing import Rebalancing
from schemas.automation import Automation
from schemas.changes import ChangeState, Forecast, JobChange
from schemas.errors import Conflict
from schemas.step import Member
from schemas.task_graph import TaskUnit
from tests.builders.graphs import graph, placement, unit
from tests.builders.jobs import job as job_record
from tests.builders.jobs import step_result
from tests.job_context import job_context

A0, A1, B0, STANDBY = (
    Member(sid=sid, incarnation="i") for sid in ("j-s0-r0", "j-s0-r1", "j-s1-r0", "j-s1-r7")
)
FORECAST = Forecast(step_before_s=0.4, step_after_s=0.2, cost_s=1.0, gain_s=20.0, steps_left=100)


def unit_of(member: Member) -> TaskUnit:
    found = unit(member.sid, standby=member == STANDBY)
    tags = (f"replica:{found.replica}",)
    return found.model_copy(update={"first_layer": found.stage, "tags": tags})


class Job:
    """All that a move has to do with, and what is asked of it."""

    def __init__(self) -> None:
        members = (A0, A1, B0, STANDBY)
        self.graph = graph(
            *map(unit_of, members),
            placements=tuple(placement(member.sid, slot) for slot, member in enumerate(members)),
        )
        self.members = {member.sid: member for member in members}
        self.stages: tuple[tuple[Member, ...], ...] = ((A0, A1), (B0, STANDBY))
        self.replacement = self
        self.running, self.at_end, self.step = True, False, 9
        self.coming: set[str] = set()
        self.closed: set[str] = set()
        self.unfit: dict[int, str] = {}
        self.done: list[str] = []
        self.moves: list[JobChange] = []
        self.changes: JobChanges
        self.ended = asyncio.Event()
        self.brought = asyncio.Event()
        self.given_up: Callable[[Unrecoverable], None] | None = None

    def is_open(self, sid: str) -> bool:
        return sid not in self.closed

    def unfit_for(self, sid: str, stage: int) -> str:
        return self.unfit.get(stage, "")

    async def end(self, member: Member) -> None:
        assert self.graph.placement(member.sid), "its node is looked up by its placement"
        self.done.append(f"end {member.sid}")
        await self.ended.wait()

    async def until_free(self, newcomer: TaskUnit) -> None:
        self.done.append(f"free {self.graph.placement(newcomer.sid).slot}")

    def bring(self, sid: str, given_up: Callable[[Unrecoverable], None] | None = None) -> None:
        self.done.append(f"bring {sid}")
        self.given_up = given_up
        self.brought.set()

    def part_with(self, member: Member) -> None:
        self.done.append(f"part with {member.sid}")
        self.stages = tuple(tuple(one for one in stage if one != member) for stage in self.stages)

    async def written(self) -> None:
        self.done.append("told")

    def changed(self, text: str) -> None:
        self.done.append("record")

    def fault(self, text: str) -> None:
        self.done.append(f"fault {text}")

    def changing(self, move: JobChange, moves: tuple[JobChange, ...]) -> None:
        assert moves[-1] == move
        self.moves.append(move)

    def decided(self, rebalancing: Rebalancing, count: int = 1) -> None:
        for _ in range(count):
            sids = {member.sid: 3 for stage in self.stages for member in stage}
            result = step_result(self.step, step_s=0.4, shares=sids)
            self.step += 1
            self.changes.decided(result, last=self.at_end)
            rebalancing.decided()


@pytest_asyncio.fixture
async def job() -> AsyncIterator[Job]:
    yield Job()


def rebalancing(job: Job, tasks: GuardedTasks, *, allowed: bool = True) -> Rebalancing:
    place: Any = job
    record = job_record("j")
    parallel = record.spec.parallel.model_copy(update={"rebalance": allowed})
    record = record.model_copy(update={"spec": record.spec.model_copy(update={"parallel": parallel})})
    mesh = SimpleNamespace(automation=Automation.ACT)
    queue = SimpleNamespace(again=lambda: job.done.append("the queue decides again"))
    context = job_context(record, mesh=mesh, queue=queue, instances=place, events=place, tasks=tasks)
    job.changes = JobChanges(context)
    return Rebalancing(context, place, place, job.changes, job.part_with)


async def test_it_leaves_when_the_step_is_decided_and_its_slot_hosts_the_newcomer(job: Job) -> None:
    tasks = GuardedTasks()
    moving = rebalancing(job, tasks)
    job.decided(moving, 8)
    assert moving.ask(A1.sid, 1, "m", FORECAST) == "j-s0-r1 will leave for stage 1 at the end of this step"
    assert job.done == []
    job.decided(moving)
    assert job.done == ["part with j-s0-r1"]
    assert moving.under_way == A1.sid
    await asyncio.sleep(0)
    assert [one.sid for one in job.graph.stage(0)] == [A0.sid, A1.sid], "the record has it until it is gone"
    job.ended.set()
    await job.brought.wait()
    assert job.done == ["part with j-s0-r1", "end j-s0-r1", "record", "told", "free 1", "bring j-s1-r1"]
    assert moving.under_way == ""
    assert [one.sid for one in job.graph.stage(0)] == [A0.sid]
    assert [one.sid for one in job.graph.stage(1)] == [B0.sid, STANDBY.sid, "j-s1-r1"]
    newcomer = job.graph.unit("j-s1-r1")
    assert (newcomer.first_layer, newcomer.standby, newcomer.tags) == (1, False, ("replica:1",))
    assert job.graph.placement("j-s1-r1") == placement("j-s1-r1", 1)
    assert len(job.graph.placements) == 4
    assert A1.sid not in job.members
    assert [move.state for move in job.moves] == [ChangeState.UNDER_WAY]
    await tasks.close()


async def test_a_newcomer_that_can_not_be_started_gives_the_slot_back(job: Job) -> None:
    tasks = GuardedTasks()
    moving = rebalancing(job, tasks)
    before = job.graph
    job.ended.set()
    moving.ask(A1.sid, 1, "rita")
    job.decided(moving)
    await job.brought.wait()
    assert job.given_up is not None
    job.given_up(Unrecoverable("out of memory"))
    assert job.done[-2:] == ["fault j-s1-r1: out of memory; j-s0-r1 comes back", "bring j-s0-r1"]
    assert {one.sid for one in job.graph.units} == {one.sid for one in before.units}
    assert job.graph.unit(A1.sid) == before.unit(A1.sid)
    assert job.graph.placement(A1.sid) == before.placement(A1.sid)
    assert [move.state for move in job.moves] == [ChangeState.UNDER_WAY, ChangeState.FAILED]
    await tasks.close()


async def test_a_persons_move_sets_the_place_of_the_newcomer_as_it_begins(job: Job) -> None:
    tasks = GuardedTasks()
    moving = rebalancing(job, tasks)
    settings: list[tuple[str, str | None, str]] = []
    moving.on_set = lambda *setting: settings.append(setting)
    moving.ask(A1.sid, 1, "rita")
    assert settings == []
    job.closed.add(A1.sid)
    job.decided(moving)
    assert settings == [], "a move that is dropped sets nothing"
    job.closed.clear()
    job.ended.set()
    moving.ask(A1.sid, 1, "rita")
    job.decided(moving)
    assert settings == [("place of j-s0-r1", None, "rita"), ("place of j-s1-r1", "stage 1", "rita")]
    await job.brought.wait()
    assert job.given_up is not None
    job.given_up(Unrecoverable("out of memory"))
    assert settings[2:] == [("place of j-s1-r1", None, "rita")], "it never came"
    await tasks.close()


async def test_a_policys_move_is_not_set_by_a_person(job: Job) -> None:
    tasks = GuardedTasks()
    moving = rebalancing(job, tasks)
    settings: list[tuple[str, str | None, str]] = []
    moving.on_set = lambda *setting: settings.append(setting)
    job.decided(moving, 8)
    moving.ask(A1.sid, 1, "m", FORECAST)
    job.decided(moving)
    assert job.done == ["part with j-s0-r1"]
    assert settings == []
    await tasks.close()


async def test_what_has_changed_since_it_was_asked_for_is_looked_at_again(job: Job) -> None:
    moving = rebalancing(job, GuardedTasks())
    moving.ask(A1.sid, 1, "rita")
    job.stages = ((A1,), (B0, STANDBY))
    job.decided(moving)
    assert job.done == ["the queue decides again"]
    job.stages = ((A0, A1), (B0, STANDBY))
    job.decided(moving)
    assert job.done == ["the queue decides again"], "it is not kept for later"


async def test_why_not(job: Job) -> None:
    moving = rebalancing(job, GuardedTasks())
    with pytest.raises(Conflict, match="nothing to compare with"):
        moving.ask(A1.sid, 1, "m", FORECAST)
    with pytest.raises(Conflict, match="j-s1-r0 is the last replica of stage 1"):
        moving.ask(B0.sid, 0, "rita")
    job.closed.add(A1.sid)
    with pytest.raises(Conflict, match="slot is cordoned"):
        moving.ask(A1.sid, 1, "rita")
    job.closed.clear()
    job.unfit[1] = "stage 1 is pinned to node b1"
    with pytest.raises(Conflict, match="stage 1 is pinned to node b1"):
        moving.ask(A1.sid, 1, "rita")
    job.unfit.clear()
    job.running = False
    with pytest.raises(Conflict, match="being brought back"):
        moving.ask(A0.sid, 1, "rita")
    job.running = True
    moving.ask(A0.sid, 1, "rita")
    with pytest.raises(Conflict, match="j-s0-r0 is about to move"):
        moving.ask(A0.sid, 1, "rita")


async def test_a_job_may_forbid_it_to_policies_but_not_to_people(job: Job) -> None:
    moving = rebalancing(job, GuardedTasks(), allowed=False)
    job.decided(moving, 8)
    with pytest.raises(Conflict, match=r"parallel\.rebalance: false"):
        moving.ask(A1.sid, 1, "m", FORECAST)
    assert moving.ask(A1.sid, 1, "rita")
