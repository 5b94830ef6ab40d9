"""In which shapes a job may go on if there is less room than it had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bus.tasks import background
from entities.orchestrator.membership.fewer_stages import FewerStages, smaller_shapes
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.automation import Automation, PinnedKnob
from schemas.cluster import NodeStatus
from schemas.job import FormerShape, JobRecord, JobSpec, JobState
from tests.builders.graphs import layer, node, topology
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec
from tests.job_context import job_context
from tests.patience import PATIENCE_S


def shapes(**parallel: Any) -> list[tuple[int, Any]]:
    found = [each.parallel for each in smaller_shapes(spec(parallel=parallel))]
    return [(each.stages, each.replicas) for each in found]


def test_most_slots_come_first_and_of_equally_many_most_stages() -> None:
    assert shapes(stages=3, replicas=1) == [(2, 1), (1, 1)]
    assert shapes(stages=2, replicas=2) == [(2, 1), (1, 2), (1, 1)]
    assert shapes(stages=1, replicas=1) == []


def test_a_range_of_replicas_stays_one() -> None:
    within = {"min": 1, "want": 2, "max": 3}
    found = [each.parallel for each in smaller_shapes(spec(parallel={"stages": 3, "replicas": within}))]
    assert [each.stages for each in found] == [2, 1]
    assert all(each.replica_range is not None and each.replica_range.want == 2 for each in found)


@pytest.mark.parametrize("replicas", [[2, 1, 1], [1, 3, 2]])
def test_unequal_stages_count_by_the_smallest(replicas: list[int]) -> None:
    assert shapes(stages=3, replicas=replicas) == [(3, 1), (2, 1), (1, 1)]


class Job:
    """A job's record, its mesh with these nodes, and what its stages are to become."""

    def __init__(
        self, record: JobRecord, *nodes: NodeStatus, automation: Automation = Automation.ACT
    ) -> None:
        self.store = Store(record)
        self.looks: list[asyncio.Task[None]] = []
        self.automation = automation
        self.open_nodes = lambda: list(nodes)
        self.open_places = lambda: frozenset((each.sid, slot.index) for each in nodes for slot in each.slots)
        one: Any = self
        context = job_context(
            record,
            store=self.store,
            mesh=one,
            instances=Instances(),
            tasks=SimpleNamespace(spawn=lambda work: self.looks.append(asyncio.create_task(work))),
        )
        changes: Any = SimpleNamespace(account=SimpleNamespace(open=None))
        self.stages = FewerStages(
            context, changes, lambda: pytest.fail("planned"), lambda why: pytest.fail("parked")
        )

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        if self.store.told:
            self.store.record = self.store.record.model_copy(update={"former_shape": None})
        return condition()


def shape(stages: int, replicas: int = 1) -> FormerShape:
    return FormerShape(parallel=spec(parallel={"stages": stages, "replicas": replicas}).parallel)


async def test_what_a_person_has_set_is_not_overridden_by_stages_that_are_possible_again() -> None:
    pin = PinnedKnob(knob="replicas", value="2", by="ada", at=1.0)
    record = job_record("j", spec=spec(parallel={"stages": 1, "replicas": 2}))
    job = Job(record.model_copy(update={"former_shape": shape(2), "pins": (pin,)}), node(slots=2))
    job.stages.began()
    await job.looks[0]
    assert job.store.told == ["1 → 2 stages are possible again, but a person has set: replicas"]


async def test_that_a_loss_could_not_be_staffed_is_in_the_record_until_there_is_room() -> None:
    record = job_record("j", JobState.PARKED, spec=spec(parallel={"stages": 3, "replicas": 1}))
    kept = Job(record).stages.kept_shape()
    assert kept == shape(3)
    job = Job(
        record.model_copy(update={"former_shape": kept})
    )  # of the next orchestrator, or of the next run
    await job.stages.settle(topology())
    assert job.store.record.former_shape == kept, "there is no room for any shape"
    job.stages.began()
    await job.looks[0]
    assert job.store.record.former_shape is None, "it got room for the whole shape"


async def test_a_job_that_waits_takes_another_shape_when_slots_join_and_leave_until_it_has_its_own() -> None:
    record = job_record("j", JobState.PARKED, spec=spec(parallel={"stages": 3, "replicas": 1}), exact=True)
    mesh, told = MeshView(), asyncio.Queue[int]()
    store = Store(record.model_copy(update={"former_shape": shape(3)}))
    instances = Instances()
    context = job_context(
        store.record,
        store=store,
        mesh=mesh,
        instances=instances,
        queue=SimpleNamespace(occupied=lambda job: {}),
    )
    changes: Any = SimpleNamespace(account=SimpleNamespace(open=None), disturbed=lambda: None)
    stages = FewerStages(context, changes, lambda: pytest.fail("analysed"), lambda why: pytest.fail("parked"))
    model = topology(*(layer(index) for index in range(6)))

    async def becomes(*slots: int) -> int:
        for number, count in enumerate(slots):
            await mesh.node(node(name=f"n{number}", slots=max(count, 1), busy=1 - min(count, 1)))
        return await asyncio.wait_for(told.get(), PATIENCE_S)

    await stages.settle(model)
    assert context.spec.parallel.stages == 3, "there is no room for any shape"
    looking = stages.look_again(model, lambda: told.put_nowait(context.spec.parallel.stages))
    async with background(looking) as task:
        assert await becomes(1) == 1
        assert await becomes(1, 1) == 2
        assert await becomes(1, 0) == 1
        assert store.record.former_shape == shape(3)
        instances.present = object()  # it has its slots now
        instances.looked_at.clear()
        await mesh.node(node(name="n1", slots=2))
        await asyncio.wait_for(instances.looked_at.wait(), PATIENCE_S)
        instances.present = None
        assert await becomes(1, 3) == 3
        await asyncio.wait_for(task, PATIENCE_S)  # nothing is left to be looked for
    assert store.record.former_shape is None
    assert [text.partition(",")[0] for text in store.told] == [
        "3 → 1 stages",
        "1 → 2 stages",
        "2 → 1 stages",
        "1 → 3 stages",
    ]


@pytest.mark.parametrize("automation", [Automation.OFF, Automation.ADVISE])
async def test_where_only_persons_act_no_shape_is_looked_for(automation: Automation) -> None:
    record = job_record("j", JobState.PARKED, spec=spec(parallel={"stages": 3, "replicas": 1}))
    assert Job(record, automation=automation).stages.kept_shape() is None
    switched = Job(record.model_copy(update={"former_shape": shape(3)}), node(), automation=automation)
    await switched.stages.settle(topology())
    assert switched.store.record.former_shape is None
    assert switched.store.record.spec == record.spec


class Instances:
    """Whether a job has its slots, and that somebody wanted to know."""

    placements = ()
    present: object = None

    def __init__(self) -> None:
        self.looked_at = asyncio.Event()

    def settle(self, spec: JobSpec) -> None:
        """Those that start later are of this job."""

    @property
    def deployed(self) -> object:
        self.looked_at.set()
        return self.present


class Store:
    """A record, and what is told of it."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.told: list[str] = []

    async def reason(self, text: str) -> None:
        self.told.append(text)

    async def note(self, *, now: bool = False, **figures: Any) -> None:
        self.record = self.record.model_copy(update=figures)

    async def tell(self, kind: str, *, text: str) -> None:
        self.told.append(text)
