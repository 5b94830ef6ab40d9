"""Which jobs have ended, as their records say: an instance's credential ends with its job."""

from __future__ import annotations

from collections.abc import Callable

from bus import subjects
from bus.buckets import Change, Watch
from bus.connection import Bus
from schemas.job import ENDED


class JobEnds:
    """`jobs` is the present state; `heard` is called for each that ends, and once for all that had before.

    A job that is not known counts as running: its first instance may be here before its record is.
    """

    def __init__(self) -> None:
        self.jobs: set[str] = set()
        self.heard: Callable[[], None] = lambda: None
        self._watch: Watch | None = None
        self._current = False

    async def start(self, bus: Bus) -> None:
        self._watch = await bus.bucket(subjects.JOB_RECORD).watch(self._changed)

    async def stop(self) -> None:
        if self._watch is not None:
            await self._watch.stop()

    async def _changed(self, change: Change) -> None:
        if not change.key:
            self._current = True
            self.heard()
        elif change.message is not None and change.message.state in ENDED:
            if change.key not in self.jobs:
                self.jobs.add(change.key)
                if self._current:
                    self.heard()
        else:
            self.jobs.discard(change.key)
