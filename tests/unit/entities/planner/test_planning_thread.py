"""The one thread that plans: what nobody waits for any more gives way to others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from entities.planner.abandoned_work import WorkAbandoned, stop_if_abandoned
from entities.planner.plan_at_once import plan_at_once
from entities.planner.plan_request import PlanRequest
from entities.planner.planning_process import beside_the_loop


async def test_cancelled_work_ends_and_the_next_has_the_thread() -> None:
    begun, ended = threading.Event(), list[str]()

    def endless() -> None:
        begun.set()
        try:
            while True:
                stop_if_abandoned()
        except WorkAbandoned:
            ended.append("abandoned")
            raise

    planning = asyncio.create_task(beside_the_loop(endless))
    await asyncio.to_thread(begun.wait)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    assert await beside_the_loop(lambda: "next") == "next"
    assert ended == ["abandoned"]


async def test_a_plan_for_which_nobody_waits_is_not_made() -> None:
    begun, cancelled, ended = threading.Event(), threading.Event(), list[type[Exception]]()

    def plan() -> None:
        begun.set()
        cancelled.wait()
        try:
            plan_at_once(PlanRequest(layers=(), slots=(), clusters=(), microbatches=1))
        except Exception as error:
            ended.append(type(error))
            raise

    planning = asyncio.create_task(beside_the_loop(plan))
    await asyncio.to_thread(begun.wait)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    cancelled.set()
    await beside_the_loop(lambda: None)
    assert ended == [WorkAbandoned]
