"""What counts as progress, and what is read of a word on it."""

from __future__ import annotations

import asyncio
import threading
import time

from bus.wire import request_progress
from bus.wire.request_progress import SO_FAR, RequestProgress, in_thread, told_in
from tests.patience import PATIENCE_S


async def test_work_that_a_command_begins_counts_for_it_in_tasks_and_threads() -> None:
    mine, others = RequestProgress(), RequestProgress()
    request_progress.moved(7)  # of no command: for nobody

    async def work() -> None:
        request_progress.present.set(mine)
        request_progress.moved()
        await asyncio.create_task(asyncio.to_thread(request_progress.moved, 10))
        request_progress.follow(others)
        request_progress.follow(others)

    await asyncio.create_task(work())
    assert mine.so_far == 11
    others.moved(100)
    assert mine.so_far == 111


def test_only_an_empty_message_with_the_header_is_a_word_on_progress() -> None:
    assert told_in(None, b"") is None
    assert told_in({"Status": "503"}, b"") is None
    assert told_in({SO_FAR: "3"}, b"an answer") is None
    assert told_in({SO_FAR: "3"}, b"") == 3
    for unreadable in ("", "-1", "1.5", "x", "9" * 19, "²", " 1"):
        assert told_in({SO_FAR: unreadable}, b"") == -1


async def test_a_thread_that_computes_gets_on_and_one_that_is_stuck_does_not() -> None:
    mine = RequestProgress()
    request_progress.present.set(mine)
    stuck, go_on = threading.Event(), threading.Event()

    def work() -> str:
        stuck.set()
        go_on.wait(PATIENCE_S)
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return "done"

    working = asyncio.create_task(in_thread(work))
    try:
        await asyncio.to_thread(stuck.wait, PATIENCE_S)
        seen = mine.so_far
        await asyncio.sleep(0.2)  # in which it could have computed ten times as much as it does afterwards
        assert mine.so_far < seen + 5_000, "that is more than falling asleep takes"
    finally:
        go_on.set()  # the loop's end waits for the thread
    assert await working == "done"
    assert mine.so_far >= seen + 20_000
    assert not mine._others, "what is over is a number"
