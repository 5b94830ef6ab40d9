"""Progress of long commands: counted where the work is done, reported to an asker that repeats its command.

An asker that repeats a running command with the header `WANTED` gets a progress report: an empty message with
the header `SO_FAR`, in the inbox of its answer, to which only the answerer can publish (ADR-0032). The count
says only that it grows: bytes that were moved, pieces that are done. Without the header there is no report,
because older askers would take it for the answer.
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
    """The progress of one command, or of work that several commands wait for."""

    __slots__ = ("_count", "_others")

    def __init__(self) -> None:
        self._count = 0
        self._others: list[RequestProgress] = []

    def moved(self, count: int = 1) -> None:
        """Adds to the count. Callable from any thread; two calls at once may count as one."""
        self._count += count

    def follow(self, other: RequestProgress) -> None:
        """Counts the progress of `other` as this one's progress, too."""
        if other is not self and other not in self._others:
            self._others.append(other)

    def leave(self, other: RequestProgress) -> None:
        """Stops following `other`; what it has counted stays."""
        if other in self._others:
            self._others.remove(other)
            self._count += other.so_far

    @property
    def so_far(self) -> int:
        return self._count + sum(other.so_far for other in self._others)


class ThreadProgress(RequestProgress):
    """The CPU time of a thread in microseconds, from its call of `begin` until its call of `end`.

    Work that proceeds takes some CPU time, even if it mostly waits for a disk; work that is stuck takes none.
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
        """Stops reading the thread's clock, so that the thread may end."""
        clock, self._clock = self._clock, None
        if clock is not None:
            self.moved(1 + (time.clock_gettime_ns(clock) - self._since) // 1000)

    @property
    def so_far(self) -> int:
        clock = self._clock
        running = (time.clock_gettime_ns(clock) - self._since) // 1000 if clock is not None else 0
        return super().so_far + running


present: ContextVar[RequestProgress | None] = ContextVar("progress", default=None)
"""The progress of the command that this task, and the tasks that it starts, work on."""


def moved(count: int = 1) -> None:
    """Adds to the progress of the present command, if there is one."""
    progress = present.get()
    if progress is not None:
        progress.moved(count)


def follow(other: RequestProgress) -> None:
    """Counts the progress of `other` as progress of the present command, if there is one."""
    progress = present.get()
    if progress is not None:
        progress.follow(other)


async def in_thread(work: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`; the thread's CPU time counts as progress of the present command."""
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
    """The count in a progress report; -1 if it can't be read; None if the message is no progress report."""
    if data or not headers or (count := headers.get(SO_FAR)) is None:
        return None
    return int(count) if count.isascii() and count.isdigit() and len(count) <= _MOST_DIGITS else -1
