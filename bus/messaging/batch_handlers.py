"""Batch handlers: the waiting requests of a subject are handled together and answered in one write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.messaging.handlers import Call, Subscription, internal
from bus.messaging.port import BusPort
from bus.nats.client import asked_to_end
from bus.nats.durable_subscription import DurableSubscription
from bus.nats.pipelined_publish import Outgoing, send_many
from bus.subject import Subject
from bus.wire.correlation import handling
from bus.wire.packed import Sendable
from schemas.envelope import Envelope
from schemas.errors import DmscError

log = get_logger("bus.messaging.handlers")

BatchHandler = Callable[[Sequence[tuple[Any, Envelope]]], Awaitable[Sequence[Sendable | DmscError]]]
"""Takes pairs of message and envelope; returns an answer or an error for each, in the same order."""


class BatchSubscription(Subscription):
    """A subscription whose workers take up to `most` waiting messages and answer them together.

    Everything else is as with `Subscription`: a repeated request runs nothing twice, one that can't be read
    is dead-lettered and answered, and what a handler raises reaches its askers. Messages that are sent while
    a batch is handled name no cause; each answer names its request.
    """

    def __init__(
        self,
        bus: BusPort,
        row: Subject,
        subject: str,
        *,
        server: BatchHandler,
        most: int,
        concurrency: int,
        pending_limit: int,
    ) -> None:
        super().__init__(
            bus,
            row,
            subject,
            handler=None,
            server=None,
            concurrency=concurrency,
            queue_group=None,
            pending_limit=pending_limit,
        )
        self._server = server
        self._most = most

    async def _take(self, subscription: DurableSubscription) -> None:
        batch = [await subscription.messages.get()]
        while len(batch) < self._most and not subscription.messages.empty():
            batch.append(subscription.messages.get_nowait())
        self._busy(subscription)
        try:
            await self._serve_batch(batch)
        finally:
            self._idle += 1
            for raw in batch:
                subscription.done(raw)

    async def _serve_batch(self, batch: Sequence[Msg]) -> None:
        handling.set(None)
        requests: list[tuple[Any, Envelope]] = []
        calls: list[Call] = []
        replies: list[Outgoing] = []
        now = time.monotonic()
        for raw in batch:
            request = await self._asked(raw)
            if request is None:
                continue
            if isinstance(request, bytes):
                replies.append(Outgoing(raw.reply, request))
                continue
            message, envelope, call = request
            admitted = self._memory.admit(call, raw.reply, now)
            if admitted is True:
                requests.append((message, envelope))
                calls.append(call)
            elif admitted is not False:
                replies.append(Outgoing(raw.reply, admitted))
        if requests:
            replies += await self._answers(requests, calls)
        try:
            await send_many(self._bus.link, replies)
        except DmscError as error:  # the bus is away: the askers repeat, and get the remembered answers
            log.debug("answers not sent", subject=self.subject, error=error.text)

    async def _answers(
        self, requests: Sequence[tuple[Any, Envelope]], calls: Sequence[Call]
    ) -> list[Outgoing]:
        answers: Sequence[Sendable | DmscError]
        try:
            answers = await self._server(requests)
        except asyncio.CancelledError:
            if asked_to_end():
                # Interrupted by shutdown: without an answer, the askers repeat their requests to the
                # successor.
                for call in calls:
                    self._memory.settle(call, None, time.monotonic())
                raise
            answers = [internal("its work was cancelled")] * len(requests)
        except DmscError as error:
            answers = [error] * len(requests)
        except Exception as error:
            self._failed(error)
            answers = [internal("see its log")] * len(requests)
        replies: list[Outgoing] = []
        now = time.monotonic()
        for (_, envelope), call, answer in zip(requests, calls, answers, strict=True):
            handling.set(envelope)
            message = answer.to_reply() if isinstance(answer, DmscError) else answer
            reply = self._encode(message, envelope.id)
            replies += [Outgoing(inbox, reply) for inbox in self._memory.settle(call, reply, now)]
        handling.set(None)
        return replies
