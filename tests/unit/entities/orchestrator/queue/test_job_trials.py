"""A job that says where it may run waits, starts and has others park by its plan, in the queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from entities.orchestrator.job import deployment
from entities.orchestrator.job.deployment import Deployment
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue import job_trials
from entities.orchestrator.queue.granted_plan import TriedPlan, try_plan
from entities.orchestrator.queue.job_queue import JobQueue, SlotGrant
from entities.orchestrator.queue.job_trials import TrialBudget, TriedMesh, parts
from entities.orchestrator.queue.mesh_slots import is_placed_by_plan, queue_rules
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanRequest
from entities.planner.search.plan_search import search_plan
from entities.queue.plan_trials import TrialLater
from schemas.job import JobState
from tests.builders.graphs import node, placement, topology
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec
from tests.builders.queue_runs import Run, heard, mesh_of, queue_of
from tests.job_context import job_context

ON_ONE_NODE = {"constraints": [{"kind": "together", "scope": "node", "layers": ["*"]}]}


def deployment_of(mesh: Any, queue: JobQueue | None = None) -> Deployment:
    """Of job `pair`, which is on one node or nowhere."""
    record = job_record("pair", JobState.QUEUED, spec=spec(parallel={"stages": 2}, plan=ON_ONE_NODE))
    outages: Any = None
    queue = queue or JobQueue(mesh, {}, {}, queue_rules())
    return Deployment(job_context(record, mesh=mesh, queue=queue), outages, waits=True)


def pair_on(mesh: Any, priority: int = 0) -> Run:
    run = Run("pair", 2, 0.0)
    run.request = replace(run.request, priority=priority)
    run.trial = partial(deployment_of(mesh).trial, topology())  # out of its turn: it searches none
    return run


def holds(name: str, slot: int, on: str, priority: int = 0) -> Run:
    run = Run(name, 1, 0.0)
    run.request = replace(run.request, priority=priority)
    run.placements = [placement(name, slot, node=on)]
    return run


async def test_a_job_without_a_plan_is_not_admitted_and_others_pass_it() -> None:
    """Two slots are free, one on each node: it would be admitted to two, and find no place there."""
    mesh = await mesh_of(node("a", "m", 2), node("a", "n", 2))
    pair, small, last = pair_on(mesh), Run("small", 1, 1.0), Run("last", 1, 2.0)
    async with queue_of(mesh, holds("m0", 0, "m"), holds("n0", 0, "n"), pair, small, last) as queue:
        await heard(pair, "no plan with the free slots: plan.constraints[0] (together)")
        await heard(small, "small")
        await heard(last, "it would delay pair, which comes first")
        assert queue.waiting == ("pair", "last")
    assert pair.plans == 0


async def test_who_parks_is_who_has_what_the_plan_lacks() -> None:
    """The lowest priorities are on two nodes: two of them park, and not the two that come first."""
    mesh = await mesh_of(node("a", "m", 2), node("a", "n", 2))
    pair = pair_on(mesh, priority=9)
    running = [holds("m0", 0, "m", 0), holds("n0", 0, "n", 1), holds("m1", 1, "m", 2), holds("n1", 1, "n", 3)]
    async with queue_of(mesh, *running, pair, order="priority"):
        await heard(pair, "waits for the exit of those who make room for it")
    gave_way = {run.name for run in running if run.gave_way}
    assert gave_way == {"m0", "m1"}
    assert pair.plans == 0


async def test_it_starts_once_one_node_has_room() -> None:
    mesh = await mesh_of(node("a", "m", 2), node("a", "n", 2))
    pair, first = pair_on(mesh), holds("m0", 0, "m")
    async with queue_of(mesh, first, holds("n0", 0, "n"), pair):
        await heard(pair, "no plan with the free slots: plan.constraints[0] (together)")
        first.placements = [placement("m0", 1, node="n")]
        await mesh.nudge()
        await heard(pair, "pair")
    assert pair.plans == 1


async def test_while_a_plan_is_searched_nobody_parks_for_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is it admitted; once the search has found none, others make room for a plan that is known."""
    mesh = await mesh_of(node("a", "m", 2), node("a", "n", 2))
    there: dict[str, Any] = {}
    asked, told = list[PlanRequest](), asyncio.Event()

    async def found(request: PlanRequest, config: Any) -> PlanAnswer:
        asked.append(request)
        await told.wait()
        raise NoPlan("none keeps them", never=False)

    monkeypatch.setattr(deployment, "searched", found)
    job = deployment_of(mesh, queue=(queue := JobQueue(mesh, there, {}, queue_rules("priority"))))
    context: Any = job._job
    context.planning = None
    low = [holds("m0", 0, "m"), holds("n0", 0, "n")]
    there.update({run.name: run for run in low})
    there["pair"] = run = Run("pair", 2, 0.0)
    run.request = replace(run.request, priority=9)
    with queue.turn("pair", partial(job.place, topology())) as turn:
        job._turn, turn.trial = turn, partial(job.trial, topology())
        deciding = asyncio.create_task(queue.run())
        news = await turn.news()
        assert isinstance(news, NoRoom)
        assert "one is searched, since at once: plan.constraints[0] (together)" in news.reason
        assert not [each for each in low if each.gave_way]
        told.set()
        news = await turn.news()
        assert isinstance(news, NoRoom)
        assert news.reason == "waits for the exit of those who make room for it"
        assert [each.name for each in low if each.gave_way] == ["m0"]
        deciding.cancel()
    assert len(asked) == 1
    assert job._later, "slots may have come free in which it was not to be searched yet"
    while job._later:
        job._later.pop().cancel()


def test_which_jobs_are_placed_by_plan() -> None:
    assert is_placed_by_plan(spec(plan=ON_ONE_NODE))
    assert is_placed_by_plan(spec(plan={"tabu": {"nodes": ["m"]}}))
    preferred = {"constraints": [{**ON_ONE_NODE["constraints"][0], "hard": False}]}
    assert not is_placed_by_plan(spec(plan=preferred))
    assert not is_placed_by_plan(spec())


async def test_trials_are_bounded_and_remembered_until_the_mesh_changes() -> None:
    mesh = await mesh_of(node("a", "m", 2), node("a", "n", 2))
    job = deployment_of(mesh)

    def trial(budget: TrialBudget) -> Any:
        tried = TriedMesh(mesh.open_nodes(), {}, {}, mesh.extent(), budget)
        return job.trial(topology_, tried)

    topology_, few = topology(), TrialBudget(most=1)
    plan = trial(few)
    assert plan(1, ["a-m/0", "a-n/0"]) is None
    assert plan.why.startswith("plan.constraints[0] (together)")
    with pytest.raises(TrialLater):
        plan(1, ["a-m/0", "a-m/1"])
    again = trial(TrialBudget(most=1))
    assert sorted(again(1, ["a-m/0", "a-m/1", "a-n/0"])) == ["a-m/0", "a-m/1"]
    assert again(1, ["a-m/0", "a-n/0"]) is None, "it was tried in an earlier decision"
    await mesh.node(node("b", "o", 2))
    changed = trial(TrialBudget(most=1, made=1))
    with pytest.raises(TrialLater):
        changed(1, ["a-m/0", "a-n/0"])


async def test_a_plan_that_a_search_has_found_counts_while_its_slots_have_what_they_had() -> None:
    """As they come, slots of both nodes would be taken: at once there is no plan on these three."""
    both = [node("a", "m", 1), node("a", "n", 2)]
    facts = deployment_of(await mesh_of(*both))._facts(topology(), SlotGrant(replicas=1), {}, {})
    search = try_plan(facts, 1, both, {}).search
    assert search is not None
    facts = replace(facts, found={search: search_plan(search)})
    assert try_plan(facts, 1, both, {}).slots == ["a-n/0", "a-n/1"]
    less = tuple(slot.model_copy(update={"memory_bytes": 1}) for slot in both[1].slots)
    both[1] = both[1].model_copy(update={"slots": less})
    assert isinstance(try_plan(facts, 1, both, {}).slots, NoRoom)


async def test_a_plan_that_fails_is_its_own_jobs_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = await mesh_of(node("a", "m", 2), node("a", "n", 1))
    pair, small = pair_on(mesh), Run("small", 1, 1.0)

    def broken(*of_all: object) -> TriedPlan:
        raise ArithmeticError("no number")

    monkeypatch.setattr(job_trials, "try_plan", broken)
    pair.fails = ArithmeticError("no number")
    async with queue_of(mesh, pair, small):
        await heard(pair, "its plan failed: ArithmeticError: no number")
        await heard(small, "small")


def test_parts_are_large_enough_for_the_replicas_that_are_tried() -> None:
    """Its whole range, from one replica on, would be too wide for a job."""
    within = {"min": 300, "want": 300, "max": 555}
    many = spec(
        parallel={"stages": 1, "replicas": within},
        training={"steps": 1, "microbatches": 1024},
        plan=ON_ONE_NODE,
    )
    slots = [f"a-m/{at}" for at in range(300)]
    assert [len(part) for part in parts(many, 300, [*slots, "a-n/0"], {})] == [300]
    assert not list(parts(many, 301, slots, {}))
