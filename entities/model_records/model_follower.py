"""Keeps a copy of the registry's models current by watching its buckets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change, WatchHandler
from bus.subject_row import Subject
from bus.tasks import background
from entities.model_records.model_index import ModelIndex
from schemas.errors import DmscError, Unavailable

log = get_logger("models")

ROWS = (subjects.NAMED_MODEL, subjects.MODEL_VERSION, subjects.ALIAS_MOVE)


class ModelFollower:
    """`index` is moments behind the registry. `guards`: this process writes the records, so it also keeps
    values that nobody can read, and puts back what was before them.

    `retry_s`: between attempts to begin while the bus is not ready.
    """

    def __init__(self, bus: Bus, *, guards: bool = False, retry_s: float = 0.5) -> None:
        self.index = ModelIndex()
        self._bus = bus
        self._guards = guards
        self._retry_s = retry_s
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
                await self._watch(row, watches)
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

    async def _watch(self, row: Subject, watches: AsyncExitStack) -> None:
        bucket = self._bus.bucket(row)
        while True:
            try:
                mend = bucket.put_back if self._guards else None
                watch = await bucket.watch(self._handler(row), mend=mend)
                break
            except DmscError as error:
                log.info("models can't be read yet", code=error.code, error=error.text)
                await asyncio.sleep(self._retry_s)
        watches.push_async_callback(watch.stop)

    def _handler(self, row: Subject) -> WatchHandler:
        async def changed(change: Change) -> None:
            if change.message is not None:
                self.index.take(change.message)
            elif not change.key:
                self._current.add(row.name)
                if len(self._current) == len(ROWS):
                    self._complete.set()

        return changed
