"""Background tasks end with their owner, and their failures are reported."""

from __future__ import annotations

import asyncio

import pytest

from bus.tasks import TaskSet, background, cancel


async def for_ever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise ValueError("no")


async def test_a_set_forgets_tasks_that_have_ended() -> None:
    tasks = TaskSet()
    done, running = tasks.create(asyncio.sleep(0)), tasks.create(for_ever(), name="long")
    await done
    await asyncio.sleep(0)
    assert len(tasks) == 1
    assert running in tasks
    assert done not in tasks
    assert running.get_name() == "long"
    await tasks.close()
    await tasks.close()
    assert running.cancelled()
    assert len(tasks) == 0


async def test_a_failure_is_reported_and_a_cancellation_is_none() -> None:
    failures: list[str] = []
    tasks = TaskSet(lambda task, error: failures.append(f"{task.get_name()}: {error}"))
    tasks.create(failing(), name="first")
    tasks.create(for_ever(), name="second")
    await asyncio.sleep(0)
    tasks.cancel_all()
    await tasks.wait()
    assert failures == ["first: no"]


async def test_waiting_includes_tasks_that_are_started_meanwhile() -> None:
    tasks, order = TaskSet(), []

    async def second() -> None:
        order.append("second")

    async def first() -> None:
        order.append("first")
        tasks.create(second())

    tasks.create(first())
    await tasks.wait()
    assert order == ["first", "second"]


async def test_a_task_of_the_set_may_close_it() -> None:
    tasks = TaskSet()
    other = tasks.create(for_ever())
    closing = tasks.create(tasks.close())
    await closing
    assert other.cancelled()
    assert not closing.cancelled()


async def test_cancel_waits_for_the_end_and_takes_none() -> None:
    ended = asyncio.Event()

    async def slow_end() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0)
            ended.set()

    task = asyncio.create_task(slow_end())
    await asyncio.sleep(0)
    await cancel(None, task)
    assert ended.is_set()
    assert task.cancelled()


async def test_background_work_ends_with_its_block() -> None:
    async def block() -> None:
        async with background(for_ever(), name="beside") as task:
            running.append(task)
            raise KeyError

    running: list[asyncio.Task[None]] = []
    with pytest.raises(KeyError):
        await block()
    (task,) = running
    assert task.cancelled()
    assert task.get_name() == "beside"
