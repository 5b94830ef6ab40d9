"""Work beside a block goes on during the block, ends with it, and disturbs it by no error."""

from __future__ import annotations

import asyncio

from dmsc.process.background import beside


async def test_it_ends_with_the_block() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fail() -> None:
        raise ValueError("reported elsewhere")

    async with beside(work(), fail(), name="both") as tasks:
        await began.wait()
        assert [task.get_name() for task in tasks] == ["both", "both"]
        assert not cancelled.is_set()
    assert cancelled.is_set()
    assert tasks[0].cancelled()
    assert isinstance(tasks[1].exception(), ValueError)
