"""Batch handlers: the waiting requests of a subject are handled together and answered in one write."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.messaging.handlers import Call, Subscription
from bus.messaging.port import BusPort
from bus.nats.durable_subscription import DurableSubscription
from bus.nats.pipelined_publish import Outgoing, send_many
from bus.subject_row import Subject
from bus.wire.correlation import handling
from bus.wire.packed import Sendable
from schemas.envelope import Envelope
from schemas.errors import DmscError, ErrorReply

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
        super().__init__(bus, row, subject, concurrency=concurrency, pending_limit=pending_limit)
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
        for raw in batch:
            request = await self._new_request(raw)
            if isinstance(request, bytes):
                replies.append(Outgoing(raw.reply, request))
            elif request is not None:
                message, envelope, call = request
                requests.append((message, envelope))
                calls.append(call)
        if requests:
            replies += await self._answers(requests, calls)
        try:
            await send_many(self._bus.connection, replies)
        except DmscError as error:  # the bus is away: the askers repeat, and get the remembered answers
            log.debug("answers not sent", subject=self.subject, error=error.text)

    async def _answers(
        self, requests: Sequence[tuple[Any, Envelope]], calls: Sequence[Call]
    ) -> list[Outgoing]:
        outcome = await self._outcome(calls, self._server, requests)
        answers = [outcome] * len(requests) if isinstance(outcome, ErrorReply) else outcome
        replies: list[Outgoing] = []
        now = time.monotonic()
        for (_, envelope), call, answer in zip(requests, calls, answers, strict=True):
            handling.set(envelope)
            message = answer.to_reply() if isinstance(answer, DmscError) else answer
            reply = self._encode(message, envelope.id)
            replies += [Outgoing(inbox, reply) for inbox in self._memory.settle(call, reply, now)]
        handling.set(None)
        return replies
