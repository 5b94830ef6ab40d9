"""What persons have set outlives the orchestrator, and ends with what it is about (ADR-0101)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.policy_service import PolicyService, PolicyTimes
from schemas.automation import OPERATOR
from tests.builders.graphs import graph, placement, unit
from tests.builders.jobs import job as job_record
from tests.job_context import job_context

TIMES = PolicyTimes(look_every_s=0.01)
UNITS = ("j-s0-r0", "j-s1-r0", "j-s1-r1")


async def confirmed() -> None:
    """It leads."""


class Job:
    """A running job whose record is written when its tasks run."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.store = SimpleNamespace(record=job_record("j"), note=self._note, tell=None)
        self.instances = SimpleNamespace(deployed=None)
        self.keep(*UNITS)

    def keep(self, *sids: str) -> None:
        places = (placement(sid, slot) for slot, sid in enumerate(sids))
        self.instances.deployed = graph(*map(unit, sids), placements=tuple(places))

    async def _note(self, *, now: bool) -> None:
        assert now
        self.written.put_nowait(tuple(pin.knob for pin in self.store.record.pins))

    def desk(self, leads: Callable[[], Awaitable[None]] = confirmed, beside: Any = None) -> PolicyService:
        """An orchestrator that has just begun to lead. `beside`: another job's run."""
        tasks: list[asyncio.Task[Any]] = []

        def spawn(work: Coroutine[Any, Any, Any]) -> None:
            tasks.append(asyncio.create_task(work))

        context = job_context(
            store=self.store, instances=self.instances, tasks=SimpleNamespace(spawn=spawn, kept=tasks)
        )
        run: Any = SimpleNamespace(
            job=context,
            training=SimpleNamespace(rebalancing=SimpleNamespace(under_way="")),
            actions=SimpleNamespace(freed=list),
        )
        bus: Any = SimpleNamespace(bucket=lambda _: None)
        queue: Any = SimpleNamespace(waiting=())
        runs = {"j": run} if beside is None else {"i": beside, "j": run}
        return PolicyService(bus, runs, MeshView(), queue, leads, ArbitrationConfig(), times=TIMES)


def pinned(desk: PolicyService) -> dict[str, str]:
    return {knob.name: knob.value for knob in desk.knobs("j") if knob.holder == OPERATOR}


async def test_the_next_orchestrator_holds_to_what_a_person_has_set_until_it_is_released() -> None:
    job = Job()
    first = job.desk()
    first.set_by_person("j", "place of j-s1-r0", None, "rita")
    first.set_by_person("j", "place of j-s1-r1", "stage 1", "rita")
    first.set_by_person("j", "replicas", "3", "rita")
    await job.written.get()
    assert await job.written.get() == ("place of j-s1-r1", "replicas")

    second = job.desk()
    assert pinned(second) == {"place of j-s1-r1": "stage 1", "replicas": "3"}
    [knob] = [knob for knob in second.knobs("j") if knob.name == "replicas"]
    assert (knob.reason, knob.left_s) == ("set by rita", None)
    second.release("j")
    assert await job.written.get() == ()
    assert pinned(second) == pinned(job.desk()) == {}


async def test_what_a_person_set_about_an_instance_ends_when_it_has_left() -> None:
    job = Job()
    desk = job.desk()
    desk.set_by_person("j", "place of j-s1-r1", "stage 1", "rita")
    desk.set_by_person("j", "replicas", "2", "rita")
    job.keep(*UNITS[:2])
    lapsing = asyncio.create_task(desk.lapses())
    while await job.written.get() != ("replicas",):
        pass
    lapsing.cancel()
    assert pinned(desk) == {"replicas": "2"}


class Deposed(Exception):
    """The term is over."""


class Term:
    """Lasts for so many looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    async def confirmed(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Deposed


async def test_a_job_without_instances_keeps_what_a_person_set_and_the_term_goes_on() -> None:
    job = Job()
    desk = job.desk(Term(3).confirmed)
    desk.set_by_person("j", "place of j-s1-r1", "stage 1", "rita")
    job.instances.deployed = None  # parked, or it waits for slots
    with pytest.raises(Deposed):
        await desk.lapses()
    assert pinned(desk) == {"place of j-s1-r1": "stage 1"}


async def test_trouble_with_one_job_holds_up_no_other_one() -> None:
    def broken() -> list[str]:
        raise AssertionError("job i is not deployed")

    job = Job()
    desk = job.desk(Term(2).confirmed, SimpleNamespace(actions=SimpleNamespace(freed=broken)))
    desk.set_by_person("j", "place of j-s1-r1", "stage 1", "rita")
    job.keep(*UNITS[:2])
    with pytest.raises(Deposed):
        await desk.lapses()
    assert pinned(desk) == {}
