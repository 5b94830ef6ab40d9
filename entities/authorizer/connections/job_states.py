"""Which jobs there are, as their records say: an instance's credential begins and ends with its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change, Watch
from schemas.job import ENDED


class JobStates:
    """`going` and `ended` are the present state; `heard` is called for each job that ends, and once for all
    that had before. A job in neither is not known: its record is not read yet, or there is no such job."""

    def __init__(self) -> None:
        self.going: set[str] = set()
        self.ended: set[str] = set()
        self.heard: Callable[[], None] = lambda: None
        self._news = asyncio.Event()
        self._watch: Watch | None = None
        self._current = False
        self._seen: set[str] | None = None  # while all records are read anew

    async def start(self, bus: Bus) -> None:
        self._seen = set()
        self._watch = await bus.bucket(subjects.JOB_RECORD).watch(self._changed)

    async def stop(self) -> None:
        if self._watch is not None:
            await self._watch.stop()

    async def news(self) -> None:
        """Returns once another job is known."""
        await self._news.wait()

    async def _changed(self, change: Change) -> None:
        job = change.key
        if self._seen is not None and job:
            self._seen.add(job)
        if not job:
            if self._seen is not None:  # records that went away while nobody watched
                self.going &= self._seen
                self._seen = None
            self._current = True
            self.heard()
        elif change.message is None:
            self.going.discard(job)
            self.ended.discard(job)
        elif change.message.state in ENDED:
            self.going.discard(job)
            if job not in self.ended:
                self.ended.add(job)
                if self._current:
                    self.heard()
        elif job not in self.going:
            self.ended.discard(job)
            self.going.add(job)
            self._news.set()
            self._news = asyncio.Event()
