"""A job is planned on a thread, and takes its slots if they are still free when the plan is there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job import deployment
from entities.orchestrator.job.deployment import PLAN_TRIES, Deployment
from entities.orchestrator.planning.placement import NoRoom, facts_digest
from entities.orchestrator.queue.granted_plan import plan_granted
from entities.orchestrator.queue.job_queue import JobQueue, SlotGrant
from entities.orchestrator.queue.mesh_slots import queue_rules
from schemas.cluster import NodeStatus
from schemas.job import JobState
from schemas.task_graph import TaskGraph
from tests.builders.graphs import node, placement, topology
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec
from tests.builders.queue_runs import Run, mesh_of
from tests.job_context import job_context


class Waiting:
    """Job `j` in a queue, on one node of some slots, beside another job that takes slots now and then."""

    def __init__(self, mesh: Any, replicas: int, **asked: Any) -> None:
        self.other = Run("other", 1, 0.0)
        self.queue = JobQueue(mesh, {"other": self.other}, {}, queue_rules())
        self.instances = SimpleNamespace(graph=None)
        of_job = spec(parallel={"replicas": replicas}, training={"steps": 2, "microbatches": 4}, **asked)
        record = job_record("j", JobState.QUEUED, spec=of_job)
        context = job_context(record, mesh=mesh, queue=self.queue, instances=self.instances)
        outages: Any = None
        self.deployment = Deployment(context, outages, waits=True)

    async def place(self, replicas: int = 1) -> TaskGraph | NoRoom:
        return await self.deployment.place(topology(), SlotGrant(replicas=replicas))


def meanwhile(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[int]:
    """Has something happen whenever a plan is there and its slots are not taken yet; counts the plans."""
    plans: list[int] = []

    def planned(facts: Any) -> Any:
        found = plan_granted(facts)
        plans.append(len(plans))
        change(len(plans))
        return found

    monkeypatch.setattr(deployment, "plan_granted", planned)
    return plans


def slots(graph: TaskGraph | NoRoom) -> set[int]:
    assert isinstance(graph, TaskGraph), graph.reason
    return {place.slot for place in graph.placements if place.slot >= 0}


async def test_it_is_planned_anew_if_another_job_has_taken_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(await mesh_of(node("a", slots=3)), 2)

    def taken(plans: int) -> None:
        waiting.other.placements = [placement("other", 0)]

    plans = meanwhile(monkeypatch, taken)
    assert slots(await waiting.place()) == {1, 2}
    assert len(plans) == 2
    assert waiting.instances.graph is not None
    assert not waiting.deployment.waits


async def test_it_is_planned_anew_if_its_slot_is_cordoned_or_its_node_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = await mesh_of(node("a", "n", 1), node("b", "n", 1))
    waiting = Waiting(mesh, 1)
    plans = meanwhile(monkeypatch, lambda plans: mesh.forget_node("a-n"))
    found = await waiting.place()
    assert isinstance(found, TaskGraph)
    assert {place.cluster for place in found.placements} == {"b"}
    assert len(plans) == 2


def given_speed(status: NodeStatus, speed: float) -> NodeStatus:
    slots = tuple(slot.model_copy(update={"speed": {"stage": speed}}) for slot in status.slots)
    return status.model_copy(update={"slots": slots})


async def test_a_plan_of_slots_that_have_changed_is_refused_and_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has taken them: the digest of what they can do is another one."""
    first = node("a", slots=2)
    mesh = await mesh_of(first)
    waiting = Waiting(mesh, 2)
    digests: list[str] = []

    def planned(facts: Any) -> Any:
        found = plan_granted(facts)
        assert isinstance(found.graph, TaskGraph)
        digests.append(found.graph.facts_digest)
        if len(digests) == 1:
            mesh.nodes["a-n"] = given_speed(first, 0.25)
        return found

    monkeypatch.setattr(deployment, "plan_granted", planned)
    found = await waiting.place(2)
    assert isinstance(found, TaskGraph)
    assert len(digests) == 2
    assert digests[0] != digests[1] == found.facts_digest
    assert facts_digest(found.placements, mesh.open_nodes()) == found.facts_digest
    mesh.nodes["a-n"] = given_speed(first, 0.2501)  # as good as measured before
    assert facts_digest(found.placements, mesh.open_nodes()) == found.facts_digest


async def test_slots_that_change_while_a_better_plan_is_searched_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = node("a", slots=2)
    waiting = Waiting(mesh := await mesh_of(first), 2)
    job, instances, held = waiting.deployment, waiting.instances, list[object]()
    instances.deployed = None
    store: Any = job._job.store

    async def written(*what: object, **fields: object) -> None:
        """To no bus."""

    store.reason = store.move = written

    async def granted(of_model: object) -> tuple[Any, float]:
        held.append(instances.deployed)
        assert job.waits
        instances.deployed = await waiting.place(2)
        return instances.deployed, 0.0

    async def improved(graph: TaskGraph, of_model: object) -> TaskGraph:
        mesh.nodes["a-n"] = given_speed(first, 0.25)
        return graph

    monkeypatch.setattr(job, "_granted", granted)
    monkeypatch.setattr(job, "_improve", improved)
    graph = await job._plan(topology())
    assert held == [None, None], "while it waits anew"
    assert graph.facts_digest == facts_digest(graph.placements, mesh.open_nodes())


async def test_a_job_that_fitted_nowhere_is_asked_again_once_slots_can_do_something_else() -> None:
    """The node warms up, and says what its slots compute with; it is the same incarnation."""
    cold = node("a", slots=2).model_copy(update={"warm": False})
    mesh = await mesh_of(cold)
    waiting = Waiting(mesh, 1, requires={"precision": "bf16"})
    assert isinstance(await waiting.place(), NoRoom)
    asked = waiting.deployment.waiting
    assert asked is not None
    assert asked.request.unfit
    able = tuple(slot.model_copy(update={"precisions": ("bf16",)}) for slot in cold.slots)
    await mesh.node(cold.model_copy(update={"warm": True, "slots": able}))
    asked = waiting.deployment.waiting
    assert asked is not None
    assert not asked.request.held
    assert isinstance(await waiting.place(), TaskGraph)


async def test_while_others_take_all_that_it_plans_it_waits_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(await mesh_of(node("a", slots=9)), 1)

    def taken(plans: int) -> None:
        waiting.other.placements = [placement("other", slot) for slot in range(plans)]

    plans = meanwhile(monkeypatch, taken)
    found = await waiting.place()
    assert isinstance(found, NoRoom)
    assert "were taken, or changed, while it was planned" in found.reason
    assert not found.never
    assert len(plans) == PLAN_TRIES
    assert waiting.instances.graph is None
    assert waiting.deployment.waits


async def test_another_shape_is_not_placed_with_a_plan_of_the_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(await mesh_of(node("a", slots=4)), 3)

    def reshaped(plans: int) -> None:
        context: Any = waiting.deployment._job
        if plans == 1:
            context.spec = spec(parallel={"replicas": 1}, training={"steps": 2, "microbatches": 4})

    plans = meanwhile(monkeypatch, reshaped)
    assert len(slots(await waiting.place())) == 1
    assert len(plans) == 2


async def test_a_search_that_breaks_is_no_verdict_and_the_job_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = await mesh_of(node("a", "m", 1), node("a", "n", 2))
    waiting = Waiting(mesh, 1)
    context: Any = waiting.deployment._job
    context.planning = None
    context.spec = spec(
        parallel={"stages": 2},
        plan={"constraints": [{"kind": "together", "scope": "node", "layers": ["*"]}]},
    )
    begun = asyncio.Event()

    async def broken(request: Any, config: Any) -> Any:
        begun.set()
        raise RuntimeError("no such answer")

    monkeypatch.setattr(deployment, "searched", broken)
    found = await waiting.place()
    assert isinstance(found, NoRoom)
    assert "a plan for places that keep the constraints is searched" in found.reason
    await begun.wait()
    await asyncio.sleep(0)
    found = await waiting.place()
    assert isinstance(found, NoRoom)
    assert "others go first: the search for a plan failed: RuntimeError: no such answer" in found.reason
    assert not found.never
    while waiting.deployment._later:
        waiting.deployment._later.pop().cancel()


async def test_slots_promised_to_others_follow_what_these_take_and_leave() -> None:
    mesh = await mesh_of(node("a", "n", 4), node("b", "n", 4))
    first, second = Run("first", 1, 0.0), Run("second", 1, 0.0)
    there: dict[str, Any] = {"first": first, "second": second}
    queue = JobQueue(mesh, there, {}, queue_rules())

    def taken(job: str = "") -> dict[str, list[int]]:
        return {
            agent: sorted(place.slot for place in places) for agent, places in queue.occupied(job).items()
        }

    assert taken() == {}
    first.placements = [placement("first", 0), placement("first", 1, cluster="b")]
    second.placements = [placement("second", 1), placement("data", -1)]
    assert taken() == {"a-n": [0, 1], "b-n": [1]}
    assert taken("first") == {"a-n": [1]}
    assert taken("second") == {"a-n": [0], "b-n": [1]}
    before = queue.occupied("")
    first.placements = [placement("first", 3)]
    assert taken() == {"a-n": [1, 3]}
    assert sorted(place.slot for place in before["a-n"]) == [0, 1], "what was handed out changes no more"
    del there["second"]
    assert taken() == {"a-n": [3]}
    mesh.forget_node("a-n")
    assert taken() == {}
