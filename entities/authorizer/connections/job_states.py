"""Running and ended jobs and builds by their records: a process's credential begins and ends with its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change, Watch
from bus.subject_row import Subject
from schemas.data_set.builds import BUILD_ENDED
from schemas.job import ENDED

ROWS = (subjects.JOB_RECORD, subjects.BUILD_RECORD)


class JobStates:
    """The jobs, and builds of data sets, in `going` and `ended`.

    `on_ended` is called when one ends, and once for all earlier ends of either kind. One in neither set is
    not known: its record is not read yet, or there is no such job.
    """

    def __init__(self) -> None:
        self.going: set[str] = set()
        self.ended: set[str] = set()
        self.on_ended: Callable[[], None] = lambda: None
        self._added = asyncio.Event()
        self._watches: list[Watch] = []
        self._current: set[str] = set()  # rows whose records have been read
        self._seen: dict[str, set[str]] = {}  # by row, while all its records are read anew
        self._of: dict[str, set[str]] = {row.name: set() for row in ROWS}  # those in `going`, by row

    async def start(self, bus: Bus) -> None:
        for row in ROWS:
            self._seen[row.name] = set()
            self._watches.append(await bus.bucket(row).watch(partial(self._on_change, row)))

    async def stop(self) -> None:
        for watch in self._watches:
            await watch.stop()
        self._watches.clear()

    async def news(self) -> None:
        """Wait until another job is known."""
        await self._added.wait()

    async def _on_change(self, row: Subject, change: Change) -> None:
        job, going = change.key, self._of[row.name]
        if job and row.name in self._seen:
            self._seen[row.name].add(job)
        if not job:
            for removed in going - self._seen.pop(row.name, going):  # without a watch
                self._end(row, removed)
            self._current.add(row.name)
            self.on_ended()
        elif change.message is None:
            self._end(row, job)
            self.ended.discard(job)
        elif change.message.state in (BUILD_ENDED if row is subjects.BUILD_RECORD else ENDED):
            self._end(row, job)
            if job not in self.ended:
                self.ended.add(job)
                if row.name in self._current:
                    self.on_ended()
        elif job not in self.going:
            self.ended.discard(job)
            self.going.add(job)
            going.add(job)
            self._added.set()
            self._added = asyncio.Event()

    def _end(self, row: Subject, job: str) -> None:
        self.going.discard(job)
        self._of[row.name].discard(job)
