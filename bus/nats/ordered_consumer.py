"""Reads a stream in order, without gaps, with back-pressure: an ephemeral pull consumer of our own.

nats-py's ordered consumer and its watchers stall for up to 20 s after a server restart, because the
ephemeral consumer went with the server and nothing says so. This reader ends with `BusUnreachable` at
once when the connection breaks, when the consumer is gone, or when heartbeats stay away; whoever
follows a stream opens a new one where the old one stopped.
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

BATCH = 256
"""Messages asked for at a time: bounds what waits in memory."""
EXPIRES_S = 20.0
HEARTBEAT_S = 4.0
"""The server says this often that a waiting request lives; twice missed, the reader gives up."""
INACTIVE_S = 60.0
"""A consumer whose reader has died is removed by the server after this."""
MADE_S = 3.0
"""One attempt to make a consumer; one whose answer was lost goes by itself (`INACTIVE_S`)."""


class OrderedConsumer:
    """One pass over a stream. `waiting` is how many messages there were to read when it was opened."""

    def __init__(self, link: NatsConnection, stream: str, consumer: str, waiting: int) -> None:
        self.waiting = waiting
        self._link = link
        self._stream = stream
        self._consumer = consumer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        link: NatsConnection,
        stream: str,
        subject: str,
        *,
        start: int | None = None,
        since: float | None = None,
        headers_only: bool = False,
    ) -> AsyncIterator[OrderedConsumer]:
        """
        Args:
            link: The connection.
            stream: The stream's name.
            subject: Filter, may have wildcards.
            start: First sequence; None begins with the last message of every subject (key-value).
            since: Instead of `start`: what the server stored from then on, seconds since the epoch.
            headers_only: Leave the bodies away.

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
            began = datetime.fromtimestamp(since, UTC).isoformat()
            config |= {"deliver_policy": "by_start_time", "opt_start_time": began}
        elif start is None:
            config["deliver_policy"] = "last_per_subject"
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start)}
        config["name"] = name = jetstream.consumer_name(link, stream, subject)
        wanted = {"stream_name": stream, "config": config}
        # The filter stands in the subject too, so that permissions can say who reads what of a stream.
        made = await jetstream.call(
            link, f"CONSUMER.CREATE.{stream}.{name}.{subject}", wanted, timeout_s=MADE_S
        )
        reader = cls(link, stream, name, int(made.get("num_pending", 0)))
        try:
            yield reader
        finally:
            with contextlib.suppress(DmscError):
                # Not awaited for an answer: the server removes it anyway.
                if link.online.is_set():
                    await jetstream.tell(link, f"CONSUMER.DELETE.{stream}.{reader._consumer}")

    async def present(self) -> AsyncGenerator[StreamMessage, None]:
        """What is there now, then ends."""
        if not self.waiting:
            return
        async for item in self._pull(follow=False):
            if item is not None:
                yield item
                if item.pending == 0:
                    return

    def follow(self) -> AsyncGenerator[StreamMessage | None, None]:
        """What is there and what comes; None where a pause shows that nothing more waits."""
        return self._pull(follow=True)

    async def _pull(self, *, follow: bool) -> AsyncGenerator[StreamMessage | None, None]:
        call = f"CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        wanted: dict[str, Any] = {"batch": BATCH}
        if follow:
            wanted |= {"expires": int(EXPIRES_S * NANO), "idle_heartbeat": int(HEARTBEAT_S * NANO)}
        else:
            wanted["no_wait"] = True
        request = json.dumps(wanted).encode()
        expected = 1
        async with self._link.stream() as (inbox, queue):
            while True:
                await jetstream.pull(self._link, call, request, inbox)
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
        """The next delivery; None at the end of what one request brings."""
        while True:
            try:
                async with asyncio.timeout(2 * HEARTBEAT_S + 1):
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
