"""Replicas that find no room are given up by the loop where it may act, and nobody has set their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.automation.loop_service import LoopTimes, OwnLoop
from schemas.automation import Automation, PinnedKnob
from schemas.job import JobState
from tests.builders.graphs import graph, placement, unit
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec
from tests.job_context import job_context

SIDS = ("j-s0-r0", "j-s0-r1")
PIN = PinnedKnob(knob="replicas", value="2", by="rita", at=1.0)


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


async def sizes(automation: Automation, *pins: PinnedKnob, beside: Any = None) -> list[int]:
    """What a job of two replicas, one of which finds no room, is told to have in three looks.

    `beside`: another job's run, which is looked at first.
    """
    given = spec(parallel={"stages": 1, "replicas": {"min": 1, "want": 2, "max": 2}})
    record = job_record("j", spec=given).model_copy(update={"state": JobState.RUNNING, "pins": pins})
    told: list[int] = []

    def change_size(replicas: int, why: str) -> bool:
        told.append(replicas)
        return True

    places = tuple(placement(sid, slot) for slot, sid in enumerate(SIDS))
    whole = graph(*map(unit, SIDS), placements=places)
    nobody = lambda: ["all"]  # noqa: E731
    run: Any = SimpleNamespace(
        name="j",
        over=False,
        job=job_context(record, instances=SimpleNamespace(graph=whole, deployed=whole)),
        training=SimpleNamespace(
            changes=SimpleNamespace(homeless={SIDS[1]}), recutting=SimpleNamespace(missing=nobody)
        ),
        holding=SimpleNamespace(
            automation=automation, replicas=2, change_size=change_size, tell_limit=lambda: None
        ),
    )
    mesh: Any = SimpleNamespace(
        automation=automation,
        links=SimpleNamespace(bytes_per_s=dict),
        cordons=SimpleNamespace(places=dict),
        quality={},
        open_nodes=list,
    )
    queue: Any = SimpleNamespace(occupied=lambda _: {})
    desk: Any = SimpleNamespace()
    times = LoopTimes(every_s=0.001, homeless_s=0.0)
    runs = {"j": run} if beside is None else {"i": beside, "j": run}
    loop = OwnLoop(runs, mesh, queue, desk, Term(3).confirmed, times=times)
    with pytest.raises(Deposed):
        await loop.run()
    return told


async def test_a_replica_without_room_is_given_up_where_the_loop_may_act() -> None:
    assert await sizes(Automation.ACT) == [1, 1, 1]


async def test_where_automation_advises_or_a_person_has_set_replicas_the_job_waits() -> None:
    assert await sizes(Automation.ADVISE) == []
    assert await sizes(Automation.ACT, PIN) == []


async def test_trouble_with_one_job_holds_up_no_other_one() -> None:
    broken = SimpleNamespace(name="i")  # it has no record
    assert await sizes(Automation.ACT, beside=broken) == [1, 1, 1]
