"""In which shapes a job may go on if there is less room than it had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.membership.fewer_stages import FewerStages, smaller_shapes
from schemas.automation import Automation, PinnedKnob
from schemas.job import FormerShape, JobRecord, JobState
from tests.builders.graphs import node
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec
from tests.job_context import job_context


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


async def test_what_a_person_has_set_is_not_overridden_by_stages_that_are_possible_again() -> None:
    former = FormerShape(parallel=spec(parallel={"stages": 2, "replicas": 1}).parallel)
    pin = PinnedKnob(knob="replicas", value="2", by="ada", at=1.0)
    record = job_record("j", JobState.RUNNING, spec=spec(parallel={"stages": 1, "replicas": 2}))
    store = Store(record.model_copy(update={"former_shape": former, "pins": (pin,)}))
    looks: list[asyncio.Task[None]] = []

    async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
        if store.told:
            store.record = store.record.model_copy(update={"former_shape": None})
        return condition()

    mesh = SimpleNamespace(automation=Automation.ACT, open_nodes=lambda: [node(slots=2)], until=until)
    context = job_context(
        store.record,
        store=store,
        mesh=mesh,
        instances=SimpleNamespace(placements=()),
        tasks=SimpleNamespace(spawn=lambda work: looks.append(asyncio.create_task(work))),
    )
    changes: Any = SimpleNamespace(account=None)
    stages = FewerStages(context, changes, lambda: pytest.fail("planned"), lambda why: pytest.fail("parked"))
    stages.began()
    await looks[0]
    assert store.told == ["1 → 2 stages are possible again, but a person has set: replicas"]


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
