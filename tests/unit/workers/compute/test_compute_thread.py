"""The compute thread: priorities, purge, exceptions."""

from __future__ import annotations

import asyncio
import threading

import pytest

from workers.compute.compute_thread import ComputeThread, Priority


async def test_orders_before_backward_before_forward() -> None:
    seen: list[str] = []
    gate = threading.Event()
    async with ComputeThread() as compute:
        first = compute.submit(Priority.ORDER, gate.wait)
        futures = [
            compute.submit(Priority.FORWARD, lambda: seen.append("forward 1")),
            compute.submit(Priority.FORWARD, lambda: seen.append("forward 2")),
            compute.submit(Priority.BACKWARD, lambda: seen.append("backward")),
            compute.submit(Priority.ORDER, lambda: seen.append("order")),
        ]
        gate.set()
        await asyncio.gather(first, *futures)
    assert seen == ["order", "backward", "forward 1", "forward 2"]


async def test_purge_drops_what_waits_but_not_orders() -> None:
    seen: list[str] = []
    gate = threading.Event()
    async with ComputeThread() as compute:
        first = compute.submit(Priority.ORDER, gate.wait)
        dropped = compute.submit(Priority.FORWARD, lambda: seen.append("forward"))
        kept = compute.submit(Priority.ORDER, lambda: seen.append("order"))
        compute.purge()
        gate.set()
        await asyncio.gather(first, kept)
        assert dropped.cancelled()
    assert seen == ["order"]


@pytest.mark.parametrize(
    ("patience_s", "order"), [(60.0, ["forward", "beside"]), (0.0, ["beside", "forward"])]
)
async def test_work_beside_comes_last_unless_it_has_waited_long(patience_s: float, order: list[str]) -> None:
    seen: list[str] = []
    gate = threading.Event()
    async with ComputeThread() as compute:
        first = compute.submit(Priority.ORDER, gate.wait)
        beside = asyncio.ensure_future(compute.beside(lambda: seen.append("beside"), patience_s))
        await asyncio.sleep(0)
        purged = compute.submit(Priority.FORWARD, lambda: seen.append("purged"))
        compute.purge()
        forward = compute.submit(Priority.FORWARD, lambda: seen.append("forward"))
        for _ in range(9):  # after no patience it is an order, too
            await asyncio.sleep(0)
        gate.set()
        _, took_s = await beside
        await asyncio.gather(first, forward)
        assert purged.cancelled()
        assert took_s >= 0
    assert seen == order, "once"


async def test_an_exception_reaches_whoever_waits_and_the_thread_lives_on() -> None:
    def broken() -> None:
        raise ValueError("user code")

    async with ComputeThread() as compute:
        with pytest.raises(ValueError, match="user code"):
            await compute.submit(Priority.FORWARD, broken)
        assert await compute.submit(Priority.FORWARD, lambda: 7) == 7
        assert compute.busy_s >= 0


@pytest.mark.parametrize("error", [StopIteration("no more"), SystemExit(3), asyncio.CancelledError()])
async def test_what_would_end_the_loop_or_be_lost_arrives_as_an_error(error: BaseException) -> None:
    def broken() -> None:
        raise error

    async with ComputeThread() as compute:
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await compute.submit(Priority.FORWARD, broken)
        assert await compute.submit(Priority.FORWARD, lambda: 7) == 7
