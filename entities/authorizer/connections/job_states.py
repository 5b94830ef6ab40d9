"""Running and ended jobs by their records: an instance's credential begins and ends with its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change, Watch
from schemas.job import ENDED


class JobStates:
    """The jobs in `going` and `ended`; `on_ended` is called when a job ends, and once for all earlier ends.

    A job in neither set is not known: its record is not read yet, or there is no such job.
    """

    def __init__(self) -> None:
        self.going: set[str] = set()
        self.ended: set[str] = set()
        self.on_ended: Callable[[], None] = lambda: None
        self._added = asyncio.Event()
        self._watch: Watch | None = None
        self._current = False
        self._initial: set[str] | None = None  # jobs seen while all records are read anew

    async def start(self, bus: Bus) -> None:
        self._initial = set()
        self._watch = await bus.bucket(subjects.JOB_RECORD).watch(self._on_change)

    async def stop(self) -> None:
        if self._watch is not None:
            await self._watch.stop()

    async def news(self) -> None:
        """Wait until another job is known."""
        await self._added.wait()

    async def _on_change(self, change: Change) -> None:
        job = change.key
        if self._initial is not None and job:
            self._initial.add(job)
        if not job:
            if self._initial is not None:  # drop records that were removed without a watch
                self.going &= self._initial
                self._initial = None
            self._current = True
            self.on_ended()
        elif change.message is None:
            self.going.discard(job)
            self.ended.discard(job)
        elif change.message.state in ENDED:
            self.going.discard(job)
            if job not in self.ended:
                self.ended.add(job)
                if self._current:
                    self.on_ended()
        elif job not in self.going:
            self.ended.discard(job)
            self.going.add(job)
            self._added.set()
            self._added = asyncio.Event()
