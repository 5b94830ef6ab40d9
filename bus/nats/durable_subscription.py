"""A subscription that outlives the client on which it was made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from bus.nats.nats_internals import handled, share_queue, stop_deliveries

PENDING_BYTES = 64 << 20
"""Most bytes of a subscription's waiting messages; more are dropped and counted, like those beyond
`pending_limit`."""

MessageCallback = Callable[[Msg], Awaitable[None]]


class DurableSubscription:
    """A subscription to one subject, made by `NatsConnection.subscribe` and made again on each new client.

    With a callback, nats-py calls it for one message after the other. Without one, the owner takes messages
    from `messages` with any number of workers, and calls `done` after each. A handler then runs one turn of
    the event loop earlier than in a task of its own, and a raised CancelledError does not end the
    subscription, as it does in nats-py's own loop.
    """

    def __init__(
        self,
        subject: str,
        *,
        queue: str,
        callback: MessageCallback | None,
        pending_limit: int,
        on_drop: Callable[[], None],
    ) -> None:
        self.subject = subject
        self.on_drop = on_drop
        self.messages: asyncio.Queue[Msg] = asyncio.Queue(maxsize=pending_limit)
        self._queue = queue
        self._callback = callback
        self._pending_limit = pending_limit
        self._sub: NatsSubscription | None = None

    async def attach(self, client: Client) -> None:
        """Subscribes on `client`; messages from an earlier client stay in the queue."""
        sub = await client.subscribe(
            self.subject,
            queue=self._queue,
            cb=self._callback,
            pending_msgs_limit=self._pending_limit,
            pending_bytes_limit=PENDING_BYTES,
        )
        if self._callback is None:
            share_queue(sub, self.messages)
        self._sub = sub

    def is_of(self, sub: object) -> bool:
        return self._sub is not None and self._sub is sub

    def done(self, message: Msg) -> None:
        """Marks a message that was taken from `messages` as handled."""
        self.messages.task_done()
        if self._sub is not None:
            handled(self._sub, message)

    async def silence(self, client: Client) -> None:
        """Tells the server to send no more; messages that it has already sent are still received."""
        if self._sub is not None:
            await stop_deliveries(client, self._sub)

    async def detach(self) -> None:
        """Removes the subscription here and at the server."""
        sub, self._sub = self._sub, None
        if sub is not None:
            await sub.unsubscribe()
