"""Synchronous callers of a loop on another thread, and what becomes of its work when they are interrupted."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest

from dmsc.client.loop_thread import LoopThread


@pytest.fixture
def runner() -> Iterator[LoopThread]:
    runner = LoopThread()
    yield runner
    runner.stop()


class Waiting:
    """An iterator that yields once, then waits for ever, and takes its time to end."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.ended: list[str] = []

    async def items(self) -> AsyncIterator[int]:
        try:
            yield 0
            self.waits.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended.append("closed")


class Interrupted(Exception):
    """What a caller's signal handler raises."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_a_caller_that_is_interrupted_while_it_waits_closes_the_iterator(
    runner: LoopThread, kind: type[BaseException]
) -> None:
    def interrupt(*_: object) -> None:
        raise kind

    waiting = Waiting()
    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def strike() -> None:
        waiting.waits.wait()
        signal.pthread_kill(main, signal.SIGUSR1)

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        with pytest.raises(kind):
            assert list(runner.iterate(waiting.items())) == [0]
    finally:
        striking.join()
        signal.signal(signal.SIGUSR1, before)
    assert waiting.ended == ["closed"]


def test_a_caller_that_is_interrupted_as_it_hands_work_over_closes_the_iterator(
    runner: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting()
    got: list[int] = []
    struck = False
    schedule = asyncio.run_coroutine_threadsafe

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
        nonlocal struck
        future = schedule(work, loop)
        if got and not struck:
            struck = True
            waiting.waits.wait()
            raise Interrupted
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(Interrupted):
        got.extend(runner.iterate(waiting.items()))
    assert got == [0]
    assert waiting.ended == ["closed"]


def test_leaving_the_loop_early_closes_the_iterator(runner: LoopThread) -> None:
    waiting = Waiting()
    for item in runner.iterate(waiting.items()):
        assert item == 0
        break
    assert waiting.ended == ["closed"]
