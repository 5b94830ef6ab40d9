"""Listens to a row that may be a flood, and looks at no more than so many of its messages a second.

The others are only counted: decoding is what costs, not receiving. For whoever shows traffic, not for whoever
must know all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nats.aio.msg import Msg

from bus.connection import Bus
from bus.nats.durable_subscription import DurableSubscription
from bus.subject import Subject
from bus.wire import codec
from schemas.base import Message
from schemas.errors import BadMessage

PENDING = 1024
"""Messages that may wait to be looked at; more are dropped and counted."""


class SampledSubscription:
    """`await glimpse.start()`, later `stop()`. `take` gets each message that is looked at.

    `overlooked` counts what was not, since it was last set to 0 by whoever reads it.
    """

    def __init__(self, bus: Bus, row: Subject, take: Callable[[Message], None], *, per_s: int) -> None:
        self.overlooked = 0
        self._bus = bus
        self._row = row
        self._take = take
        self._per_s = per_s
        self._second = 0
        self._looked = 0
        self._feed: DurableSubscription | None = None

    async def start(self) -> None:
        """The subscription stands at the server on return. Raises `Refused`, `BusUnreachable`."""
        self._feed = await self._bus.link.subscribe(
            self._row.wildcard(), self._arrive, pending_limit=PENDING, on_drop=self._overlook
        )

    async def stop(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await self._bus.link.unsubscribe(feed)

    def _overlook(self) -> None:
        self.overlooked += 1

    async def _arrive(self, arrived: Msg) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._looked = second, 0
        if self._looked >= self._per_s:
            self._overlook()
            return
        self._looked += 1
        try:
            message, _ = codec.decode(arrived.data, self._row.schema)
        except BadMessage:
            return  # its receiver counts it
        self._take(message)
