"""Tasks whose failure their owner meets where it waits."""

from __future__ import annotations

import asyncio

import pytest

from entities.orchestrator.job_state.guarded_tasks import GuardedTasks


async def broken(text: str) -> None:
    raise ValueError(text)


async def test_a_failure_ends_the_present_wait_and_every_later_one() -> None:
    tasks = GuardedTasks()
    never = asyncio.Event()
    tasks.spawn(broken("first"))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await tasks.unless_failed(never.wait())
    tasks.fail(ValueError("second"))
    assert tasks.failed
    with pytest.raises(ValueError, match="first"):
        await tasks.unless_failed(never.wait())
    await tasks.close()


async def test_what_was_waited_for_is_given_up_at_a_failure() -> None:
    tasks = GuardedTasks()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(tasks.unless_failed(work()))
    await begun.wait()
    tasks.fail(ValueError("enough"))
    with pytest.raises(ValueError, match="enough"):
        await waiting
    assert ended.is_set()


async def test_work_that_is_done_counts_before_a_failure_and_its_own_errors_end_nothing_else() -> None:
    tasks = GuardedTasks()

    async def result() -> int:
        return 7

    assert await tasks.unless_failed(result()) == 7
    with pytest.raises(ValueError, match="own"):
        await tasks.unless_failed(broken("own"))
    assert not tasks.failed


async def test_what_is_spawned_after_closing_does_not_begin() -> None:
    tasks, begun = GuardedTasks(), []

    async def work() -> None:
        begun.append(True)

    await tasks.close()
    late = tasks.spawn(work())
    await asyncio.wait({late})
    assert late.cancelled()
    assert not begun
    assert not tasks.failed


async def test_closing_ends_what_ending_tasks_begin() -> None:
    tasks = GuardedTasks()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(asyncio.Event().wait())

    task = tasks.spawn(stubborn())
    await asyncio.sleep(0)
    await tasks.close()
    assert task.cancelled()
    assert not tasks.failed, "to be cancelled is no failure"
    await tasks.close()
