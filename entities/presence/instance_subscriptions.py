"""What the instances of one cluster publish, and only those: a subscription per (job, SID).

A wildcard would have each router and gateway decode the traffic of the whole mesh (DESIGN §8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.subject import Subject
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.registry import ServiceRecord

log = get_logger("instance-feed")

RETRY_S = 0.3
"""Pause before subscriptions that could not be made are tried again."""

TOGETHER = 16
"""Subscriptions that are asked for at once: each waits for the server's word, thousands of them seconds. With
more nothing else would have its turn meanwhile."""

Handler = Callable[[Any, Envelope], Awaitable[None]]


class InstanceSubscriptions:
    """Subscriptions of `row`, which has the tokens `job` and `sid`, to a changing set of instances."""

    def __init__(self, bus: Bus, row: Subject, handler: Handler) -> None:
        self._bus = bus
        self._row = row
        self._handler = handler
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._lock = asyncio.Lock()
        self._due = asyncio.Event()

    async def run(self, wanted: Callable[[], Iterable[ServiceRecord]]) -> None:
        """Follow what is wanted, asking again after each `refresh`; until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self.follow(wanted())
            except DmscError as error:  # the bus is away: subscriptions that stand come back by themselves
                log.info(
                    "subscriptions not complete yet", row=self._row.name, code=error.code, error=error.text
                )
                await asyncio.sleep(RETRY_S)
                self._due.set()

    def refresh(self) -> None:
        """The wanted instances may have changed."""
        self._due.set()

    @property
    def followed(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._subscriptions)

    async def follow(self, records: Iterable[ServiceRecord]) -> None:
        """From now on listen to exactly these instances."""
        wanted = {(record.job, record.sid) for record in records if record.job is not None}
        async with self._lock:
            for key in self._subscriptions.keys() - wanted:
                await self._subscriptions.pop(key).stop(drain=False)
            missing = sorted(wanted - self._subscriptions.keys())
            for start in range(0, len(missing), TOGETHER):
                await self._begin(missing[start : start + TOGETHER])

    async def _begin(self, keys: Sequence[tuple[str, str]]) -> None:
        outcomes = await asyncio.gather(
            *(self._bus.subscribe(self._row, self._handler, job=job, sid=sid) for job, sid in keys),
            return_exceptions=True,
        )
        for key, outcome in zip(keys, outcomes, strict=True):
            if isinstance(outcome, Subscription):
                self._subscriptions[key] = outcome
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def stop(self) -> None:
        await self.follow(())
