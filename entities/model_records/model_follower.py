"""Keeps a copy of the registry's models current by watching its buckets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change, WatchHandler
from bus.subject_row import Subject
from bus.tasks import background
from entities.model_records.model_index import ModelIndex
from entities.patient_watch import watching
from schemas.errors import Unavailable

ROWS = (subjects.NAMED_MODEL, subjects.MODEL_VERSION, subjects.ALIAS_MOVE)


class ModelFollower:
    """`index` is moments behind the registry. `guards`: this process writes the records, so it also keeps
    values that nobody can read, and puts back what was before them.
    """

    def __init__(self, bus: Bus, *, guards: bool = False) -> None:
        self.index = ModelIndex()
        self._bus = bus
        self._guards = guards
        self._current: set[str] = set()
        self._complete = asyncio.Event()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follows for the time of the block, which does not wait until the copy is complete."""
        async with background(self.run(), name="follow models"):
            yield

    async def run(self) -> None:
        """Follows until cancelled."""
        async with AsyncExitStack() as watches:
            for row in ROWS:
                bucket = self._bus.bucket(row)
                mend = bucket.put_back if self._guards else None
                await watches.enter_async_context(watching(bucket, self._handler(row), mend=mend))
            await asyncio.get_running_loop().create_future()

    async def complete(self, patience_s: float) -> ModelIndex:
        """The index, once everything that was there at the start is in it.

        Raises:
            Unavailable: it is not within `patience_s` seconds.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self._complete.wait()
        except TimeoutError:
            raise Unavailable("the registry's models are still being read: ask again in a moment") from None
        return self.index

    def _handler(self, row: Subject) -> WatchHandler:
        async def changed(change: Change) -> None:
            if change.message is not None:
                self.index.take(change.message)
            elif not change.key:
                self._current.add(row.name)
                if len(self._current) == len(ROWS):
                    self._complete.set()

        return changed
