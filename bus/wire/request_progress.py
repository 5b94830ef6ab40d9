"""How far a command has come that takes long: counted where its work is done, told to who asks again.

Who repeats a command with the header `WANTED`, and finds it running, gets a word on it (`SO_FAR`, without
anything else) at the inbox of its answer, which nobody but the answerer writes to (ADR-0032). The count means
nothing but that it grows: bytes that were moved, pieces that are done. Who gave no such header gets no word:
older ones would take it for the answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TypeVar

WANTED = "Dmsc-Progress-Wanted"
SO_FAR = "Dmsc-So-Far"
_MOST_DIGITS = 18

T = TypeVar("T")


class RequestProgress:
    """Of one command, or of work that several commands wait for."""

    __slots__ = ("_count", "_others")

    def __init__(self) -> None:
        self._count = 0
        self._others: list[RequestProgress] = []

    def moved(self, count: int = 1) -> None:
        """From any thread: two at once may count as one."""
        self._count += count

    def follow(self, other: RequestProgress) -> None:
        """What `other` counts is this one's progress, too."""
        if other is not self and other not in self._others:
            self._others.append(other)

    def leave(self, other: RequestProgress) -> None:
        """It has counted: that stays."""
        if other in self._others:
            self._others.remove(other)
            self._count += other.so_far

    @property
    def so_far(self) -> int:
        return self._count + sum(other.so_far for other in self._others)


class ThreadProgress(RequestProgress):
    """What a thread computes, in microseconds, from when it calls `begin` until it calls `end`.

    Work that gets on takes some of its thread's time, however much of it is waiting for a disk; work that is
    stuck takes none.
    """

    __slots__ = ("_clock", "_since")

    def __init__(self) -> None:
        super().__init__()
        self._clock: int | None = None
        self._since = 0

    def begin(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            clock = time.pthread_getcpuclockid(threading.get_ident())
            self._since, self._clock = time.clock_gettime_ns(clock), clock

    def end(self) -> None:
        """Nobody looks at the clock any more: the thread may end."""
        clock, self._clock = self._clock, None
        if clock is not None:
            self.moved(1 + (time.clock_gettime_ns(clock) - self._since) // 1000)

    @property
    def so_far(self) -> int:
        clock = self._clock
        running = (time.clock_gettime_ns(clock) - self._since) // 1000 if clock is not None else 0
        return super().so_far + running


present: ContextVar[RequestProgress | None] = ContextVar("progress", default=None)
"""Of the command that this task, or whatever it has begun, works on."""


def moved(count: int = 1) -> None:
    """Something of the present command's work is done."""
    progress = present.get()
    if progress is not None:
        progress.moved(count)


def follow(other: RequestProgress) -> None:
    """The present command waits for work that counts for itself."""
    progress = present.get()
    if progress is not None:
        progress.follow(other)


async def in_thread(work: Callable[[], T]) -> T:
    """`asyncio.to_thread`, and what the thread computes is the present command's progress."""
    progress = present.get()
    if progress is None:
        return await asyncio.to_thread(work)
    computing = ThreadProgress()
    progress.follow(computing)

    def run() -> T:
        computing.begin()
        try:
            return work()
        finally:
            computing.end()

    try:
        return await asyncio.to_thread(run)
    finally:
        progress.leave(computing)


def told_in(headers: Mapping[str, str] | None, data: bytes) -> int | None:
    """The count of a word on progress; -1 where it has none that can be read; None: this is no such word."""
    if data or not headers or (said := headers.get(SO_FAR)) is None:
        return None
    return int(said) if said.isascii() and said.isdigit() and len(said) <= _MOST_DIGITS else -1
