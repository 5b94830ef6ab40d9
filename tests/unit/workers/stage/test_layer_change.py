"""Orders of a re-cut that reach a stage instance in another order than they were given."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import Conflict
from schemas.recut import RecutDrop, RecutPrepare
from schemas.step import Member
from tests.sim.recuts import RecutWorld, SimMember

SID = "j-s0-r0"


def instance() -> SimMember:
    world = RecutWorld(0)
    assert world.bucket.graph is not None
    return SimMember(world, Member(sid=SID, incarnation="i"), world.bucket.graph)


def prepare(at: SimMember, plan: int, epoch: int = 1) -> RecutPrepare:
    """It is to have one layer more."""
    unit = at.change._start.unit
    longer = unit.model_copy(update={"last_layer": unit.last_layer + 1})
    return RecutPrepare(job="j", epoch=epoch, plan=plan, unit=longer, takes=(), gives=())


async def test_a_plan_that_was_given_up_before_the_order_to_build_it_came_is_not_built() -> None:
    at = instance()
    await at.change.dropped(RecutDrop(job="j", epoch=1, plan=1))
    with pytest.raises(Conflict, match="plan 1 is to be built, but it was given up"):
        await at.change.prepare(prepare(at, 1))
    assert at.change.built is None
    await at.change.prepare(prepare(at, 2))
    assert at.change.built is not None
    await at.change.dropped(RecutDrop(job="j", epoch=1, plan=2))
    await at.change.prepare(prepare(at, 1, epoch=2))  # by a leader that knows nothing of those
    assert at.change.built is not None


async def test_whoever_has_a_plan_built_hears_that_it_was_given_up_meanwhile() -> None:
    at = instance()
    building = asyncio.ensure_future(at.change.prepare(prepare(at, 1)))
    await asyncio.sleep(0)
    assert at.change.built is not None
    await at.change.dropped(RecutDrop(job="j", epoch=1, plan=1))
    with pytest.raises(Conflict, match="plan 1 was given up while it was built"):
        await building
