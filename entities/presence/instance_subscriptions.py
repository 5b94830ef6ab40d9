"""Subscriptions to the messages of one cluster's instances: one subscription per (job, SID).

With a wildcard each router and gateway would decode the traffic of the whole mesh (DESIGN §8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.subject_row import Subject
from schemas.envelope import Envelope
from schemas.errors import DmscError

log = get_logger("instance-feed")

TOGETHER = 16
"""Subscriptions made at once: each waits for the server's answer, so thousands one by one would take seconds.
With more at once, nothing else on the event loop would run meanwhile."""

Handler = Callable[[Any, Envelope], Awaitable[None]]


class FollowedInstance(Protocol):
    """What is followed: a record of the registry, or an agent's own note of an instance."""

    @property
    def job(self) -> str | None: ...
    @property
    def sid(self) -> str: ...


class InstanceSubscriptions:
    """Subscriptions of `row`, which has the tokens `job` and `sid`, to a changing set of instances.

    Failed subscriptions are tried again after `retry_s`.
    """

    def __init__(self, bus: Bus, row: Subject, handler: Handler, *, retry_s: float = 0.3) -> None:
        self._retry_s = retry_s
        self._bus = bus
        self._row = row
        self._handler = handler
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._lock = asyncio.Lock()
        self._due = asyncio.Event()

    async def run(self, instances: Callable[[], Iterable[FollowedInstance]]) -> None:
        """Follow the instances that `instances` returns, again after each `refresh`, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self.follow(instances())
            except DmscError as error:  # the bus is away: existing subscriptions come back by themselves
                log.info(
                    "subscriptions not complete yet", row=self._row.name, code=error.code, error=error.text
                )
                await asyncio.sleep(self._retry_s)
                self._due.set()

    def refresh(self) -> None:
        """The instances to follow may have changed."""
        self._due.set()

    @property
    def followed(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._subscriptions)

    async def follow(self, records: Iterable[FollowedInstance]) -> None:
        """Subscribe to exactly these instances from now on."""
        targets = {(record.job, record.sid) for record in records if record.job is not None}
        async with self._lock:
            for key in self._subscriptions.keys() - targets:
                await self._subscriptions.pop(key).stop(drain=False)
            missing = sorted(targets - self._subscriptions.keys())
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
