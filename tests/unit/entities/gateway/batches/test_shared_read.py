"""Whoever asks while a read is under way gets the next one, together with all others who do."""

from __future__ import annotations

import asyncio

import pytest

from entities.gateway.batches.shared_read import SharedRead
from schemas.errors import Unavailable


async def test_one_read_for_all_who_ask_at_the_same_time() -> None:
    rows: list[str] = []
    go, began = asyncio.Event(), asyncio.Event()
    reads = 0

    async def read() -> list[str]:
        nonlocal reads
        reads += 1
        found = [*rows]
        began.set()
        await go.wait()
        return found

    shared = SharedRead(read)
    first = asyncio.create_task(shared())
    await began.wait()
    rows.append("written before the others asked")
    others = [asyncio.create_task(shared()) for _ in range(100)]
    await asyncio.sleep(0)
    others.pop().cancel()  # one who leaves ends nobody's read
    go.set()
    assert await first == []
    assert await asyncio.gather(*others) == [rows] * 99
    assert reads == 2


async def test_a_read_that_fails_is_read_again() -> None:
    failures = [Unavailable("away")]

    async def read() -> str:
        if failures:
            raise failures.pop()
        return "rows"

    shared = SharedRead(read)
    with pytest.raises(Unavailable):
        await shared()
    assert await shared() == "rows"
