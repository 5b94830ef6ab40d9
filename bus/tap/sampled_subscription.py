"""Subscribes to a busy row and decodes at most so many of its messages a second.

The others are only counted, because decoding is expensive and receiving is not. It is for services that show
traffic, not for those that must know all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nats.aio.msg import Msg

from bus.connection import Bus
from bus.nats.durable_subscription import DurableSubscription
from bus.subject_row import Subject
from bus.wire import codec
from schemas.base import Message
from schemas.errors import BadMessage

PENDING = 1024
"""Most messages that wait to be decoded; more are dropped and counted."""


class SampledSubscription:
    """`await subscription.start()`, later `stop()`. `take` gets each message that is decoded.

    `overlooked` counts the messages that were not; its reader sets it to 0.
    """

    def __init__(self, bus: Bus, row: Subject, take: Callable[[Message], None], *, per_s: int) -> None:
        self.overlooked = 0
        self._bus = bus
        self._row = row
        self._take = take
        self._per_s = per_s
        self._second = 0
        self._decoded = 0
        self._subscription: DurableSubscription | None = None

    async def start(self) -> None:
        """Subscribes; returns once the server has the subscription.

        Raises:
            Refused, BusUnreachable: see `NatsConnection.subscribe`.
        """
        self._subscription = await self._bus.connection.subscribe(
            self._row.wildcard(), self._arrive, pending_limit=PENDING, on_drop=self._overlook
        )

    async def stop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._bus.connection.unsubscribe(subscription)

    def _overlook(self) -> None:
        self.overlooked += 1

    async def _arrive(self, raw: Msg) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._decoded = second, 0
        if self._decoded >= self._per_s:
            self._overlook()
            return
        self._decoded += 1
        try:
            message, _ = codec.decode(raw.data, self._row.schema)
        except BadMessage:
            return  # the message's receiver counts it
        self._take(message)
