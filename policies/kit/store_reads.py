"""A policy's reads of local stores (draft §6.3), and the reader that carries them out for a module.

The policy only names a read; the answer comes as an event like any other. So `decide` stays pure, and a store
that does not answer delays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import cancel
from policies.kit.instance_store import InstanceStore
from schemas.errors import DmscError
from schemas.store import StoreQuery, StoreRows

log = get_logger("module")

MOST_READS = 16
"""Most reads of one module under way; further ones are dropped, and the policy may ask again."""


@dataclass(frozen=True, slots=True)
class StoreRead:
    """One query to one instance, made by `Policy.read`."""

    sid: str
    query: StoreQuery


class StoreReader:
    """Carries out a module's reads; `answered` is called on the event loop with each answer."""

    def __init__(self, bus: Bus, answered: Callable[[StoreRows], None], owner: str = "") -> None:
        """`answered` gets each answer; `owner` is as for `InstanceStore`."""
        self._bus = bus
        self._owner = owner
        self._answered = answered
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()

    def start(self, reads: list[StoreRead]) -> None:
        """Begins these reads, except those under way already."""
        for read in reads:
            key = f"{read.sid} {read.query.model_dump_json()}"
            if key not in self._tasks and len(self._tasks) < MOST_READS:
                task = asyncio.create_task(self._read(read), name=f"read store of {read.sid}")
                self._tasks[key] = task
                task.add_done_callback(partial(self._ended, key))

    async def close(self) -> None:
        """Gives up the reads under way."""
        await cancel(*self._tasks.values())

    def _ended(self, key: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(key)

    async def _read(self, read: StoreRead) -> None:
        try:
            store = InstanceStore(self._bus, job=read.query.job, sid=read.sid, owner=self._owner)
            self._answered(await store.ask(read.query))
            self._silent.discard(read.sid)
        except DmscError as error:
            if read.sid not in self._silent:
                self._silent.add(read.sid)
                log.info("local store not read", sid=read.sid, job=read.query.job, reason=error.text)
