"""Reads a stream in order, without gaps and with back-pressure, through an ephemeral pull consumer.

nats-py's ordered consumer and its watchers stall for up to 20 s after a server restart, because the
ephemeral consumer is gone with the server and nothing reports that. This reader raises `BusUnreachable` at
once when the connection breaks, when the consumer is gone, or when heartbeats stay away. A caller that
follows a stream then opens a new reader where the old one stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Any

from nats.aio.msg import Msg

from bus.nats import jetstream
from bus.nats.client import ConnectionLost, NatsConnection
from bus.nats.jetstream import NANO, StreamMessage
from schemas.errors import BusUnreachable, DmscError
from schemas.limits import INACTIVE_S

BATCH = 256
"""Messages requested at a time; bounds what waits in memory."""


class OrderedConsumer:
    """One pass over a stream. `waiting` is the number of messages to read when it was opened."""

    def __init__(self, connection: NatsConnection, stream: str, consumer: str, waiting: int) -> None:
        self.waiting = waiting
        self._connection = connection
        self._stream = stream
        self._consumer = consumer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        connection: NatsConnection,
        stream: str,
        subject: str,
        *,
        start: int | None = None,
        since: float | None = None,
        headers_only: bool = False,
    ) -> AsyncIterator[OrderedConsumer]:
        """Makes the consumer, and removes it at the end of the block.

        Args:
            connection: The connection.
            stream: The stream's name.
            subject: Filter, may have wildcards.
            start: First sequence; None begins with the last message of every subject (key-value).
            since: Instead of `start`: the time of the first message, seconds since the epoch.
            headers_only: Deliver the messages without their bodies.

        Raises:
            NotFound: no such stream.
        """
        config: dict[str, Any] = {
            "filter_subject": subject,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(INACTIVE_S * NANO),
            "mem_storage": True,
            "num_replicas": 1,
            "headers_only": headers_only,
        }
        if since is not None:
            start_time = datetime.fromtimestamp(since, UTC).isoformat()
            config |= {"deliver_policy": "by_start_time", "opt_start_time": start_time}
        elif start is None:
            config["deliver_policy"] = "last_per_subject"
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start)}
        config["name"] = name = jetstream.consumer_name(connection, stream, subject)
        request = {"stream_name": stream, "config": config}
        # The filter is part of the subject too, so that permissions can say who reads what of a stream.
        consumer = await jetstream.call(
            connection,
            f"CONSUMER.CREATE.{stream}.{name}.{subject}",
            request,
            timeout_s=connection.times.consumer_made_s,
        )
        reader = cls(connection, stream, name, int(consumer.get("num_pending", 0)))
        try:
            yield reader
        finally:
            with contextlib.suppress(DmscError):
                # Nobody waits for the answer: the server removes an inactive consumer anyway.
                if connection.online.is_set():
                    await jetstream.tell(connection, f"CONSUMER.DELETE.{stream}.{reader._consumer}")

    async def present(self) -> AsyncGenerator[StreamMessage, None]:
        """Yields the messages that are there now, then ends."""
        if not self.waiting:
            return
        async for item in self._pull(follow=False):
            if item is not None:
                yield item
                if item.pending == 0:
                    return

    def follow(self) -> AsyncGenerator[StreamMessage | None, None]:
        """Yields the messages that are there and those that come; None while no message waits."""
        return self._pull(follow=True)

    async def _pull(self, *, follow: bool) -> AsyncGenerator[StreamMessage | None, None]:
        call = f"CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        options: dict[str, Any] = {"batch": BATCH}
        times = self._connection.times
        if follow:
            options["expires"] = int(times.pull_expires_s * NANO)
            options["idle_heartbeat"] = int(times.pull_heartbeat_s * NANO)
        else:
            options["no_wait"] = True
        request = json.dumps(options).encode()
        expected = 1
        async with self._connection.stream() as (inbox, queue):
            while True:
                await jetstream.pull(self._connection, call, request, inbox)
                received = 0
                while received < BATCH:
                    message = await self._next(queue)
                    if message is None:
                        break
                    if jetstream.consumer_sequence(message) != expected:
                        raise BusUnreachable(f"reading {self._stream}: a message was lost on the way")
                    expected += 1
                    received += 1
                    yield jetstream.stored(message)
                if received < BATCH:
                    if not follow:
                        return
                    yield None

    async def _next(self, queue: asyncio.Queue[Msg | ConnectionLost]) -> Msg | None:
        """The next delivery; None after the last one of a pull request."""
        while True:
            try:
                async with asyncio.timeout(2 * self._connection.times.pull_heartbeat_s + 1):
                    message = await queue.get()
            except TimeoutError:
                raise BusUnreachable(f"reading {self._stream}: the bus fell silent") from None
            if isinstance(message, ConnectionLost):
                raise BusUnreachable(f"reading {self._stream}: the connection to the bus broke")
            if message.reply.startswith("$JS.ACK."):
                return message
            status = (message.headers or {}).get("Status")
            if status in ("404", "408"):
                return None
            if status != "100":
                raise BusUnreachable(f"reading {self._stream}: the consumer is gone ({status})")
