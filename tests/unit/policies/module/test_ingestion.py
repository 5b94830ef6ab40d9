"""When events that wait are handed on: what may lead to a decision at once, the rest in company."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from bus import subjects
from policies.kit.engine import Event
from policies.kit.policy import Policy
from policies.module.ingestion import MANY, Ingestion
from tests.builders.telemetry import sample

FOR_EVER = 3_600.0
TURNS = 10
"""Of the event loop: more than it takes to see that something came."""


def event(number: int = 0) -> Event:
    return Event(row=subjects.INSTANCE_SAMPLE, message=sample(), id=f"e-{number}", at=0.0)


def inbox(urgent: bool = False, gather_s: float = FOR_EVER, queue: int = 10_000) -> Ingestion:
    policy = cast(Policy, object())
    return Ingestion(cast(Any, None), policy, (), queue, gather_s, lambda event, now: urgent, "system")


async def waits(task: asyncio.Task[None]) -> bool:
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return not task.done()


async def test_an_urgent_event_does_not_wait() -> None:
    box = inbox(urgent=True)
    task = asyncio.create_task(box.until_worth_a_round(lambda: None))
    assert await waits(task)
    box.put(event())
    await task
    assert len(box.drained()) == 1


async def test_others_wait_until_they_are_many() -> None:
    box = inbox()
    task = asyncio.create_task(box.until_worth_a_round(lambda: None))
    for number in range(MANY - 1):
        box.put(event(number))
    assert await waits(task)
    box.put(event(MANY))
    await task
    assert len(box.drained()) == MANY
    again = asyncio.create_task(box.until_worth_a_round(lambda: None))
    assert await waits(again), "what was handed on is no longer many"
    again.cancel()


async def test_a_single_one_does_not_wait_for_ever() -> None:
    box = inbox(gather_s=0.01)
    task = asyncio.create_task(box.until_worth_a_round(lambda: None))
    assert await waits(task)
    box.put(event())
    await task
    assert len(box.drained()) == 1


@pytest.mark.parametrize("due", [0.0, 0.01])
async def test_a_decision_that_is_due_waits_for_no_event(due: float) -> None:
    left = iter([due, 0.0])
    await inbox().until_worth_a_round(lambda: next(left))


async def test_a_round_can_be_hurried_without_any_event() -> None:
    box = inbox()
    task = asyncio.create_task(box.until_worth_a_round(lambda: None))
    assert await waits(task)
    box.hurry()
    await task
    assert box.drained() == []
    again = asyncio.create_task(box.until_worth_a_round(lambda: None))
    assert await waits(again)
    again.cancel()
